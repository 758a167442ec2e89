//! The decision map of a model on points of the plane.

use crate::error::Error;
use crate::picture::{Bounds, DecisionMap, Point};
use crate::step::prediction_inputs;
use crate::trainer::Trainer;
use kolo_data::{Column, Field, Kind, ReadError};

const COLUMNS: usize = 120;
const ROWS: usize = 120;
const POINTS_MAX: usize = 400;

/// The map, if the job is about two classes of points of the plane.
pub fn decision_map(trainer: &mut Trainer) -> Result<Option<DecisionMap>, Error> {
    // Workers that share the model would have to draw it together.
    if trainer.shares_model() {
        return Ok(None);
    }
    let job = trainer.job().clone();
    let plane = |field: &Field| field.shape == [2] && field.kind == Kind::Real;
    let two = |field: &Field| field.elements() == 1 && field.kind == Kind::Index { classes: 2 };
    let (Some(x), Some(y)) = (job.fields.iter().position(plane), job.fields.iter().position(two)) else {
        return Ok(None);
    };
    // The model sees the point, and nothing else.
    if !prediction_inputs(&*job.model)?.iter().eq([&job.fields[x].name]) {
        return Ok(None);
    }
    let point = |at: usize| {
        let (mut place, mut label) = ([0.0; 2], [0; 1]);
        let sample = job.split.held_out(at);
        let read = job.source.fill(sample, job.columns[x], Column::F32(&mut place));
        read.and_then(|()| job.source.fill(sample, job.columns[y], Column::I32(&mut label)))
            .map_err(|error| error.of(&job.source_name, sample))?;
        Ok(Point { at: place, label: label[0] as usize })
    };
    let points: Vec<Point> =
        (0..job.split.held_out_len().min(POINTS_MAX)).map(point).collect::<Result<_, ReadError>>()?;
    let bounds = Bounds::around(&points);
    let grid = bounds.centres(COLUMNS, ROWS);
    let logits = trainer.predict(grid.len(), |feed| {
        if let Some(values) = feed.f32(&job.fields[x].name) {
            values.chunks_exact_mut(2).zip(&grid).for_each(|(out, at)| out.copy_from_slice(at));
        }
    })?;
    let probability = |pair: &[f32]| 1.0 / (1.0 + (pair[0] - pair[1]).exp());
    let probabilities = logits.chunks_exact(2).map(probability).collect();
    Ok(Some(DecisionMap::new(bounds, COLUMNS, ROWS, probabilities, points)))
}
