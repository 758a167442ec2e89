//! What a model's graph yields: means that add up over grains, workers and batches.
//!
//! A batch is computed grain by grain. A mean over all samples of the batch is the mean of the grains' means, as grains are
//! equally large. A mean over the targets that count is not: one grain may have more of them. So such a mean is kept as a sum
//! and a count. Both are added up, and the division comes last.

use kolo_graph::Tensor;
use kolo_graph::field::IGNORED;
use kolo_ops::cross_entropy::CrossEntropy;
use kolo_ops::prelude::*;

/// A mean over a grain's samples or, with `counted`, the sum of a mean over those targets that count.
#[derive(Clone, Copy, Debug)]
pub struct Mean<'b> {
    pub value: Tensor<'b>,
    pub counted: Option<Counted<'b>>,
}

/// How many targets of a grain count.
#[derive(Clone, Copy, Debug)]
pub struct Counted<'b> {
    /// A scalar, f32.
    pub number: Tensor<'b>,
    /// All targets of the grain.
    pub of: usize,
}

impl<'b> Mean<'b> {
    /// The mean of a sum over `number` of the grain's `of` targets.
    pub fn counted(sum: Tensor<'b>, number: Tensor<'b>, of: usize) -> Self {
        Self { value: sum, counted: Some(Counted { number, of }) }
    }
}

/// A mean over the grain's samples. A cross-entropy becomes the mean over the targets that it does not ignore. One that is
/// part of a larger formula cannot: training refuses a batch in which such a formula ignores a target, if it has several grains.
impl<'b> From<Tensor<'b>> for Mean<'b> {
    fn from(value: Tensor<'b>) -> Self {
        let made = {
            let graph = value.builder().graph();
            let maker = graph.maker(value.id());
            let op = maker.op.downcast::<CrossEntropy>().filter(|op| op.mean && maker.outputs[0] == value.id());
            op.map(|op| (op.clone(), maker.inputs.clone()))
        };
        let Some((op, inputs)) = made else { return Self { value, counted: None } };
        let [logits, targets] = [0, 1].map(|at| value.builder().tensor(inputs[at]));
        let (sum, number) = logits.cross_entropy_sum(targets, op.ignore, op.smoothing);
        Self::counted(sum, number, targets.ty().elements())
    }
}

/// Of language models: e to the power of the loss.
pub(crate) const PERPLEXITY: &str = "perplexity";

/// Which of two values of a metric is the better one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Of an error.
    Lower,
    /// Of a score.
    Higher,
}

impl Better {
    /// For metrics that do not say it: less is better of what is called a loss, an mse or a perplexity.
    pub fn by_name(metric: &str) -> Self {
        match ["loss", "mse", "perplexity"].iter().any(|name| metric.ends_with(name)) {
            true => Better::Lower,
            false => Better::Higher,
        }
    }

    /// Whether a new value is better than the best so far.
    pub fn improves(self, new: f64, best: f64) -> bool {
        match self {
            Better::Lower => new < best,
            Better::Higher => new > best,
        }
    }
}

/// What a model's graph yields for one grain.
#[derive(Clone, Debug)]
pub struct Outputs<'b> {
    pub loss: Mean<'b>,
    pub metrics: Vec<(&'static str, Mean<'b>)>,
    /// What the model says about each sample: logits or values.
    pub predictions: Tensor<'b>,
    /// Of a classifier: the class of each prediction, from which evaluations count a confusion matrix.
    pub labels: Option<Tensor<'b>>,
}

impl<'b> Outputs<'b> {
    pub fn new(loss: impl Into<Mean<'b>>, predictions: Tensor<'b>) -> Self {
        Self { loss: loss.into(), metrics: Vec::new(), predictions, labels: None }
    }

    /// Adds a metric that evaluations report.
    pub fn metric(mut self, name: &'static str, mean: impl Into<Mean<'b>>) -> Self {
        self.metrics.push((name, mean.into()));
        self
    }
}

/// Loss, accuracy and logits of a classifier. Labels of [`IGNORED`] do not count.
pub fn classify<'b>(logits: Tensor<'b>, labels: Tensor<'b>, smoothing: f32) -> Outputs<'b> {
    let last = logits.rank().saturating_sub(1);
    let right = logits.argmax(last).equal(labels).cast(DType::F32).sum_all();
    let (sum, number) = logits.cross_entropy_sum(labels, i64::from(IGNORED), smoothing);
    let of = labels.ty().elements();
    let outputs = Outputs::new(Mean::counted(sum, number, of), logits);
    Outputs { labels: Some(labels), ..outputs.metric("accuracy", Mean::counted(right, number, of)) }
}
