//! `standardise`: columns of numbers with mean 0 and deviation 1, as measured on the training samples.

use crate::error::ReadError;
use crate::format::OpenError;
use crate::sample::{Form, Sample, TableColumn, ValueForm};
use crate::transform::{ALWAYS, Cx, Setup, Transform, TransformKind, VisitTraining, misplaced};
use kolo_graph::settings::{Settings, nearest};

pub const KIND: TransformKind = TransformKind {
    name: "standardise",
    doc: "columns of numbers with mean 0 and deviation 1, measured on the training samples",
    keys: "`columns = […]` (default: all columns of numbers)",
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
    let both = setup.fit("mean_and_deviation", |training| moments(training, chosen.len()))?;
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

/// Means, then deviations: two passes would be exact too, but read everything twice. Welford's in f64, in the order of the
/// samples.
fn moments(training: &dyn VisitTraining, elements: usize) -> Result<Vec<f32>, ReadError> {
    let (mut mean, mut squares, mut count) = (vec![0.0f64; elements], vec![0.0f64; elements], 0.0f64);
    training.visit(&mut |sample| {
        count += 1.0;
        for (at, value) in sample.x.reals.iter().enumerate().take(elements) {
            let difference = f64::from(*value) - mean[at];
            mean[at] += difference / count;
            squares[at] += difference * (f64::from(*value) - mean[at]);
        }
    })?;
    let deviations = squares.iter().map(|sum| (sum / f64::max(count, 1.0)).sqrt());
    Ok(mean.iter().copied().chain(deviations).map(|value| value as f32).collect())
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
