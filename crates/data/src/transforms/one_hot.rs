//! `one_hot`: a column of names as a row of zeros with a one.

use crate::error::ReadError;
use crate::format::OpenError;
use crate::sample::{Form, Sample, TableColumn, ValueForm};
use crate::transform::{ALWAYS, Cx, Setup, Transform, TransformKind, misplaced};
use kolo_graph::settings::Settings;

pub const KIND: TransformKind = TransformKind {
    name: "one_hot",
    doc: "columns of names as a number per name, 0 or 1; the names are found by one scan, sorted",
    keys: "`columns = […]` (default: all columns of names among the inputs)",
    when: ALWAYS,
    make,
};

/// Stands for a name that is missing: all its numbers are 0.
pub(crate) const NO_NAME: f32 = -1.0;

/// Names of one column.
const CATEGORIES_MAX: usize = 10_000;

/// Numbers of the input, each kept or widened to so many.
#[derive(Debug)]
struct OneHot {
    widths: Vec<Option<usize>>,
}

fn make(table: &Settings, form: &mut Form, _: &mut Setup<'_>) -> Result<Box<dyn Transform>, OpenError> {
    let ValueForm::Reals { shape, columns } = &mut form.x else { return Err(misplaced(table, "columns of a table")) };
    let wanted = table.texts("columns", "[\"colour\"]")?;
    let is_chosen = |column: &TableColumn| wanted.is_empty() || wanted.contains(&column.name);
    let unknown = |name: &&String| !columns.iter().any(|column| column.name == **name && column.categories.is_some());
    if let Some(name) = wanted.iter().find(unknown) {
        let message = format!("names \"{name}\", which is not an input column of names");
        return Err(table.wrong("columns", message, "name columns of text, or of classes").into());
    }
    let mut widths = Vec::new();
    for column in columns.iter_mut() {
        match column.categories.filter(|_| is_chosen(column)) {
            Some(categories) if categories > CATEGORIES_MAX => {
                let message = format!("has \"{}\" with {categories} different names", column.name);
                return Err(table.wrong("columns", message, format!("{CATEGORIES_MAX} are allowed")).into());
            }
            Some(categories) => {
                widths.push(Some(categories));
                (column.elements, column.categories) = (categories, None);
            }
            None => widths.extend(std::iter::repeat_n(None, column.elements)),
        }
    }
    *shape = vec![columns.iter().map(|column| column.elements).sum()];
    Ok(Box::new(OneHot { widths }))
}

impl Transform for OneHot {
    fn apply(&self, sample: &mut Sample, _: &mut Cx<'_>) -> Result<(), ReadError> {
        let narrow = std::mem::take(&mut sample.x.reals);
        let reals = sample.x.set_reals();
        for (value, width) in narrow.iter().zip(&self.widths) {
            match width {
                None => reals.push(*value),
                Some(width) => {
                    let start = reals.len();
                    reals.resize(start + width, 0.0);
                    if *value != NO_NAME {
                        reals[start + (*value as usize).min(width - 1)] = 1.0;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Draw;
    use crate::transform::tests::{Few, applied, made, text};
    use kolo_graph::settings::Setting;

    #[test]
    fn names_become_rows() {
        let column = |name: &str, categories| TableColumn { name: name.into(), elements: 1, categories };
        let columns = vec![column("a", None), column("colour", Some(3)), column("b", None)];
        let mut form = Form { x: ValueForm::Reals { shape: vec![3], columns }, y: None };
        let one_hot = made(&[("kind", text("one_hot"))], &mut form.clone(), &Few::default()).unwrap();
        let mut sample = Sample::default();
        sample.x.set_reals().extend([7.0, 2.0, 9.0]);
        let after = applied(&*one_hot, &sample, Draw { sample: 0, epoch: None }, &Few::default()).unwrap();
        assert_eq!(after.x.reals, [7.0, 0.0, 0.0, 1.0, 9.0]);
        sample.x.reals[1] = NO_NAME;
        let after = applied(&*one_hot, &sample, Draw { sample: 0, epoch: None }, &Few::default()).unwrap();
        assert_eq!(after.x.reals, [7.0, 0.0, 0.0, 0.0, 9.0]);
        let keys = [("kind", text("one_hot")), ("columns", Setting::List(vec![text("a")]))];
        assert!(made(&keys, &mut form, &Few::default()).unwrap_err().contains("not an input column of names"));
    }
}
