//! The samples of a grain in memory.

use super::Recipe;
use crate::error::ReadError;
use crate::source::{Draw, Row};
use crate::stream::Walk;
use kolo_graph::field::{Column, Field, Kind};

/// The samples of a grain, column by column. Its memory is allocated once.
#[derive(Debug, Default)]
pub struct Samples {
    numbers: Vec<usize>,
    columns: Vec<Stored>,
}

#[derive(Debug)]
struct Stored {
    /// Of one sample.
    elements: usize,
    values: Owned,
}

#[derive(Debug)]
enum Owned {
    F32(Vec<f32>),
    I32(Vec<i32>),
}

/// Who knows which samples a grain has, and makes them.
#[derive(Clone, Copy, Debug)]
pub struct Maker<'m> {
    pub recipe: &'m dyn Recipe,
    /// The recipe's way through the samples, if it has one.
    pub walk: Option<&'m dyn Walk>,
}

/// One sample's place in the columns.
struct StoredRow<'a> {
    at: usize,
    columns: &'a mut [Stored],
}

impl Row for StoredRow<'_> {
    fn column(&mut self, column: usize) -> Column<'_> {
        let Stored { elements, values } = &mut self.columns[column];
        let range = self.at * *elements..(self.at + 1) * *elements;
        match values {
            Owned::F32(values) => Column::F32(&mut values[range]),
            Owned::I32(values) => Column::I32(&mut values[range]),
        }
    }
}

/// The values of one column, sample after sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Values<'a> {
    F32(&'a [f32]),
    I32(&'a [i32]),
}

impl Samples {
    /// Room for this many samples.
    pub fn new(recipe: &dyn Recipe, samples: usize) -> Self {
        let fields = recipe.source().fields();
        let stored = |column: &usize| {
            let elements = fields[*column].elements();
            let values = match fields[*column].kind {
                Kind::Real => Owned::F32(vec![0.0; elements * samples]),
                Kind::Index { .. } => Owned::I32(vec![0; elements * samples]),
            };
            Stored { elements, values }
        };
        Self { numbers: Vec::with_capacity(samples), columns: recipe.columns().iter().map(stored).collect() }
    }

    /// Bytes that so many samples of these fields take.
    pub fn bytes<'f>(fields: impl Iterator<Item = &'f Field>, samples: usize) -> usize {
        let each =
            fields.map(|field| field.elements().saturating_mul(4)).fold(size_of::<usize>(), usize::saturating_add);
        each.saturating_mul(samples)
    }

    /// Makes the samples of a grain, one after the other, as long as `go_on`.
    pub fn make(
        &mut self,
        maker: Maker<'_>,
        step: usize,
        grain: usize,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(), ReadError> {
        self.numbers.clear();
        let Maker { recipe, walk } = maker;
        match walk {
            Some(walk) => walk.choose(step, grain, &mut self.numbers),
            None => recipe.choose(step, grain, &mut self.numbers),
        }
        let epoch = recipe.epoch(step);
        for (at, sample) in self.numbers.iter().copied().enumerate() {
            if !go_on() {
                break;
            }
            let mut row = StoredRow { at, columns: &mut self.columns };
            let draw = Draw { sample, epoch };
            let made = match walk {
                Some(walk) => walk.read(draw, recipe.columns(), &mut row),
                None => recipe.source().read(draw, recipe.columns(), &mut row),
            };
            made.map_err(|error| error.of(recipe.source_name(), sample))?;
        }
        Ok(())
    }

    /// The values of the wanted field number `column`.
    pub fn values(&self, column: usize) -> Values<'_> {
        let Stored { elements, values } = &self.columns[column];
        let end = elements * self.numbers.len();
        match values {
            Owned::F32(values) => Values::F32(&values[..end]),
            Owned::I32(values) => Values::I32(&values[..end]),
        }
    }
}
