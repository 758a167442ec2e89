//! `standardise`: columns of numbers with mean 0 and deviation 1, as measured on the training samples.

use crate::error::ReadError;
use crate::format::OpenError;
use crate::sample::{Form, Sample, TableColumn, ValueForm};
use crate::transform::{ALWAYS, Cx, Setup, TargetScale, Transform, TransformKind, VisitTraining, misplaced};
use kolo_graph::settings::{Settings, nearest};

pub const KIND: TransformKind = TransformKind {
    name: "standardise",
    doc: "columns of numbers, or the target, with mean 0 and deviation 1, measured on the training samples",
    keys: "`columns = […]` (default: all columns of numbers), or `of = \"target\"`: the target instead; predictions and metrics are in its own unit",
    when: ALWAYS,
    make,
};

#[derive(Debug)]
struct Standardise {
    /// Taken from each number, and what it is then multiplied with.
    mean: Vec<f32>,
    scale: Vec<f32>,
}

fn make(table: &Settings, form: &mut Form, setup: &mut Setup<'_>) -> Result<Box<dyn Transform>, OpenError> {
    if table.peek("of").is_some() && table.choice("of", &["inputs", "target"])? == "target" {
        return make_of_target(table, form, setup);
    }
    let ValueForm::Reals { shape, columns } = &form.x else { return Err(misplaced(table, "numbers")) };
    let wanted = table.texts("columns", "[\"a\", \"b\"]")?;
    if let Some(name) = wanted.iter().find(|name| !columns.iter().any(|column| column.name == **name)) {
        let near = nearest(name, columns.iter().map(|column| column.name.as_str()));
        let hint = near.map_or("name inputs of the job".into(), |near| format!("did you mean \"{near}\"?"));
        return Err(table.wrong("columns", format!("names \"{name}\", which is not an input"), hint).into());
    }
    // Which of the numbers.
    let chosen: Vec<bool> = match columns.is_empty() {
        true => vec![true; shape.iter().product()],
        false => columns
            .iter()
            .flat_map(|column| {
                let all = wanted.is_empty() && column.categories.is_none();
                std::iter::repeat_n(all || wanted.contains(&column.name), column.elements)
            })
            .collect(),
    };
    let groups = groups_of(columns, chosen.len());
    let both = setup.fit("mean_and_deviation", |training| moments(training, &groups, &|sample| &sample.x.reals))?;
    if both.len() != 2 * chosen.len() {
        return Err(table.wrong("kind", "was fitted to other columns", "use the job file of the training").into());
    }
    let (mean, deviation) = both.split_at(chosen.len());
    if let Some(at) = (0..chosen.len()).find(|at| chosen[*at] && !(mean[*at].is_finite() && deviation[*at].is_finite()))
    {
        let message = format!(
            "cannot be measured: {} has the mean {} and the deviation {}",
            column_of(at, columns),
            mean[at],
            deviation[at]
        );
        let hint = "take infinite and huge numbers out of the column, or leave it out with `columns` or `inputs`";
        return Err(table.wrong("columns", message, hint).into());
    }
    let mean = mean.iter().zip(&chosen).map(|(mean, chosen)| if *chosen { *mean } else { 0.0 }).collect();
    // A number that never changes stays: it becomes 0.
    let scale = |(deviation, chosen): (&f32, &bool)| if *chosen && *deviation > 0.0 { 1.0 / deviation } else { 1.0 };
    Ok(Box::new(Standardise { mean, scale: deviation.iter().zip(&chosen).map(scale).collect() }))
}

/// What number `at` of the input is called.
fn column_of(at: usize, columns: &[TableColumn]) -> String {
    let mut end = 0;
    let found = columns.iter().find(|column| {
        end += column.elements;
        at < end
    });
    found.map_or_else(|| format!("number {at} of the input"), |column| format!("column \"{}\"", column.name))
}

/// Which numbers are measured together: those of columns with the same name, which are rows of one column. Others are each for
/// themselves.
fn groups_of(columns: &[TableColumn], numbers: usize) -> Vec<usize> {
    let mut groups = Vec::new();
    for (at, column) in columns.iter().enumerate() {
        let first = columns[..at].iter().position(|other| other.name == column.name);
        match first.filter(|_| column.elements == 1) {
            Some(first) => groups.push(columns[..first].iter().map(|column| column.elements).sum()),
            None => groups.extend(groups.len()..groups.len() + column.elements),
        }
    }
    groups.extend(groups.len()..numbers);
    groups
}

/// Means, then deviations: two passes would be exact too, but read everything twice. Welford's in f64, in the order of the
/// samples.
fn moments(
    training: &dyn VisitTraining,
    groups: &[usize],
    values: &dyn Fn(&Sample) -> &Vec<f32>,
) -> Result<Vec<f32>, ReadError> {
    let elements = groups.len();
    let (mut mean, mut squares, mut count) = (vec![0.0f64; elements], vec![0.0f64; elements], vec![0.0f64; elements]);
    training.visit(&mut |sample| {
        for (value, group) in values(sample).iter().zip(groups) {
            count[*group] += 1.0;
            let difference = f64::from(*value) - mean[*group];
            mean[*group] += difference / count[*group];
            squares[*group] += difference * (f64::from(*value) - mean[*group]);
        }
    })?;
    let deviation = |group: &usize| (squares[*group] / f64::max(count[*group], 1.0)).sqrt();
    let means = groups.iter().map(|group| mean[*group]);
    Ok(means.chain(groups.iter().map(deviation)).map(|value| value as f32).collect())
}

/// The target with mean 0 and deviation 1.
#[derive(Debug)]
struct StandardiseTarget(TargetScale);

fn make_of_target(table: &Settings, form: &mut Form, setup: &mut Setup<'_>) -> Result<Box<dyn Transform>, OpenError> {
    if table.has("columns") {
        let hint = "leave it out, and write a second transform for inputs: `{ kind = \"standardise\" }`";
        return Err(table.wrong("columns", "names inputs, but `of = \"target\"` is about the target", hint).into());
    }
    let groups = match &form.y {
        Some(ValueForm::Reals { shape, columns }) => Some(groups_of(columns, shape.iter().product())),
        // Of new files, whose target is still unknown.
        None if setup.fitted.complete => None,
        _ => {
            let message = "is \"target\", but the target is not made of numbers";
            return Err(table
                .wrong("of", message, "write `task = \"regression\"` under [data], or leave it out")
                .into());
        }
    };
    let known = groups.as_deref().unwrap_or_default();
    let both = setup.fit("of_target", |training| moments(training, known, &|sample| &sample.y.reals))?;
    if both.is_empty() || groups.as_ref().is_some_and(|groups| both.len() != 2 * groups.len()) {
        return Err(table.wrong("kind", "was fitted to another target", "use the job file of the training").into());
    }
    if let Some(value) = both.iter().find(|value| !value.is_finite()) {
        let message = format!("cannot be measured: its mean or deviation is {value}");
        return Err(table.wrong("of", message, "take infinite and huge numbers out of the target").into());
    }
    let (mean, deviation) = both.split_at(both.len() / 2);
    let deviation = deviation.iter().map(|deviation| if *deviation > 0.0 { *deviation } else { 1.0 }).collect();
    Ok(Box::new(StandardiseTarget(TargetScale { mean: mean.into(), deviation })))
}

impl Transform for StandardiseTarget {
    fn apply(&self, sample: &mut Sample, _: &mut Cx<'_>) -> Result<(), ReadError> {
        let numbers = sample.y.reals.iter_mut().take(self.0.mean.len()).enumerate();
        numbers.for_each(|(at, value)| *value = self.0.standard(at, *value));
        Ok(())
    }

    fn target_scale(&self) -> Option<&TargetScale> {
        Some(&self.0)
    }
}

impl Transform for Standardise {
    fn apply(&self, sample: &mut Sample, _: &mut Cx<'_>) -> Result<(), ReadError> {
        let both = self.mean.iter().zip(&self.scale);
        sample.x.reals.iter_mut().zip(both).for_each(|(value, (mean, scale))| *value = (*value - mean) * scale);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::TableColumn;
    use crate::source::Draw;
    use crate::transform::tests::{Few, applied, made, text};
    use kolo_graph::settings::Setting;

    #[test]
    fn columns_are_measured_on_the_training_samples() {
        let row = |values: &[f32]| {
            let mut sample = Sample::default();
            sample.x.set_reals().extend(values);
            sample
        };
        let few = Few(vec![row(&[1.0, 10.0, 5.0]), row(&[3.0, 30.0, 5.0])]);
        let column = |name: &str| TableColumn { name: name.into(), elements: 1, categories: None };
        let columns = vec![column("a"), column("b"), column("c")];
        let form = Form { x: ValueForm::Reals { shape: vec![3], columns }, y: None };
        let transformed = |keys: &[(&str, Setting)]| {
            let keys: Vec<_> = [("kind", text("standardise"))].into_iter().chain(keys.iter().cloned()).collect();
            let standardise = made(&keys, &mut form.clone(), &few)?;
            applied(&*standardise, &few.0[1], Draw { sample: 1, epoch: None }, &few).map(|sample| sample.x.reals)
        };
        assert_eq!(transformed(&[]), Ok(vec![1.0, 1.0, 0.0]));
        let only = |name: &str| Setting::List(vec![text(name)]);
        assert_eq!(transformed(&[("columns", only("b"))]), Ok(vec![3.0, 1.0, 5.0]));
        assert!(transformed(&[("columns", only("d"))]).unwrap_err().contains("names \"d\", which is not an input"));
    }
}
