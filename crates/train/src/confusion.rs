//! How a classifier did, class by class: counts, which add up over batches and workers without rounding.

use serde::{Deserialize, Serialize};

/// How often which class was taken for which.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confusion {
    classes: usize,
    /// Row by row: the row is the true class, the column the prediction.
    counts: Vec<i64>,
}

/// One class of a [`Confusion`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassRow {
    pub class: usize,
    /// What the data call it, if they do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The part of the predictions of this class that are right; 0 if there are none.
    pub precision: f64,
    /// The part of this class's samples that are found; 0 if there are none.
    pub recall: f64,
    /// Samples of this class.
    pub samples: i64,
}

/// Classes of a matrix that a report holds, at most.
const REPORTED_CLASSES_MAX: usize = 100;

/// A [`Confusion`] as a report holds it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Classification {
    pub classes: Vec<ClassRow>,
    /// The row is the true class, the column the prediction. Left out if there are more than 100 classes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confusion: Option<Vec<Vec<i64>>>,
}

impl Confusion {
    /// From the counts of all pairs, row by row; `None` if they are no square.
    pub fn new(counts: Vec<i64>) -> Option<Self> {
        let classes = counts.len().isqrt();
        (classes > 0 && classes * classes == counts.len()).then_some(Self { classes, counts })
    }

    pub fn classes(&self) -> usize {
        self.classes
    }

    pub fn row(&self, class: usize) -> &[i64] {
        &self.counts[class * self.classes..(class + 1) * self.classes]
    }

    pub fn class(&self, class: usize) -> ClassRow {
        let (hits, samples) = (self.row(class)[class], self.row(class).iter().sum::<i64>());
        let part = |of: i64| if of == 0 { 0.0 } else { hits as f64 / of as f64 };
        ClassRow { class, name: None, precision: part(self.predicted(class)), recall: part(samples), samples }
    }

    fn predicted(&self, class: usize) -> i64 {
        (0..self.classes).map(|row| self.row(row)[class]).sum()
    }

    /// The means of precision and recall over the classes that occur, as a label or as a prediction.
    pub fn macro_means(&self) -> (f64, f64) {
        let rows = (0..self.classes).map(|class| (self.class(class), self.predicted(class)));
        let rows: Vec<ClassRow> =
            rows.filter(|(row, predicted)| row.samples + predicted > 0).map(|(row, _)| row).collect();
        let mean = |of: fn(&ClassRow) -> f64| rows.iter().map(of).sum::<f64>() / rows.len().max(1) as f64;
        (mean(|row| row.precision), mean(|row| row.recall))
    }

    /// For a report, with the names of the classes where there are any.
    pub fn report(&self, names: Option<&[String]>) -> Classification {
        let confusion = (self.classes <= REPORTED_CLASSES_MAX)
            .then(|| self.counts.chunks(self.classes).map(<[i64]>::to_vec).collect());
        let name = |class: usize| names.and_then(|names| names.get(class)).cloned();
        let row = |class: usize| ClassRow { name: name(class), ..self.class(class) };
        Classification { classes: (0..self.classes).map(row).collect(), confusion }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `sklearn.metrics.precision_recall_fscore_support(…, zero_division=0)` of the same labels.
    #[test]
    fn precision_and_recall_are_those_of_scikit_learn() {
        // Class 3 never occurs; class 2 is never predicted; class 1 is predicted wrongly twice.
        let confusion = Confusion::new([[3, 1, 0, 0], [0, 2, 0, 0], [1, 1, 0, 0], [0; 4]].concat()).unwrap();
        let rows: Vec<(f64, f64, i64)> =
            (0..4).map(|class| confusion.class(class)).map(|row| (row.precision, row.recall, row.samples)).collect();
        assert_eq!(rows, [(0.75, 0.75, 4), (0.5, 1.0, 2), (0.0, 0.0, 2), (0.0, 0.0, 0)]);
        let (precision, recall) = confusion.macro_means();
        assert!((precision - 1.25 / 3.0).abs() < 1e-15 && (recall - 1.75 / 3.0).abs() < 1e-15);
        let names = ["cat", "dog", "owl"].map(String::from);
        let report = confusion.report(Some(&names));
        assert_eq!(report.confusion.unwrap()[0], [3, 1, 0, 0]);
        assert_eq!((report.classes[2].name.as_deref(), report.classes[3].name.as_deref()), (Some("owl"), None));
    }

    #[test]
    fn many_classes_have_no_matrix_in_the_report() {
        let report = Confusion::new(vec![1; 101 * 101]).unwrap().report(None);
        assert!(report.confusion.is_none() && report.classes.len() == 101);
        assert!(Confusion::new(vec![1; 3]).is_none() && Confusion::new(Vec::new()).is_none());
    }
}
