//! Some samples of a source, under numbers of their own.

use crate::error::ReadError;
use crate::load_times::LoadTimes;
use crate::source::{Draw, Row, SampleCost, SampleName, Source};
use crate::transform::TargetScale;
use kolo_graph::field::{Column, Field};
use std::path::Path;

/// The samples of a source that a list names, in its order.
#[derive(Debug)]
pub struct ChosenSamples {
    source: Box<dyn Source>,
    samples: Vec<usize>,
}

impl ChosenSamples {
    pub fn new(source: Box<dyn Source>, samples: Vec<usize>) -> Self {
        Self { source, samples }
    }
}

impl Source for ChosenSamples {
    fn fields(&self) -> &[Field] {
        self.source.fields()
    }

    fn len(&self) -> usize {
        self.samples.len()
    }

    fn fill(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        self.source.fill(self.samples[sample], field, out)
    }

    fn read(&self, draw: Draw, fields: &[usize], row: &mut dyn Row) -> Result<(), ReadError> {
        self.source.read(Draw { sample: self.samples[draw.sample], ..draw }, fields, row)
    }

    fn cost(&self) -> SampleCost {
        self.source.cost()
    }

    fn cached_bytes(&self) -> usize {
        self.source.cached_bytes()
    }

    fn share_memory(&self, processes: usize) {
        self.source.share_memory(processes);
    }

    fn in_order(&self) -> bool {
        self.source.in_order()
    }

    fn reads(&self, file: &Path) -> bool {
        self.source.reads(file)
    }

    fn describe(&self) -> String {
        format!("{} samples of {}", self.samples.len(), self.source.describe())
    }

    fn notes(&self) -> Vec<String> {
        self.source.notes()
    }

    fn alphabet(&self) -> Option<&str> {
        self.source.alphabet()
    }

    fn class_names(&self) -> Option<&[String]> {
        self.source.class_names()
    }

    fn sample_name(&self, sample: usize) -> SampleName {
        self.source.sample_name(self.samples[sample])
    }

    fn missing_target(&self, sample: usize) -> Option<&str> {
        self.source.missing_target(self.samples[sample])
    }

    fn target_scale(&self) -> Option<&TargetScale> {
        self.source.target_scale()
    }

    fn is_unreadable(&self, sample: usize) -> bool {
        self.source.is_unreadable(self.samples[sample])
    }

    fn load_times(&self) -> Option<LoadTimes> {
        self.source.load_times()
    }
}
