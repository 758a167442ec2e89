//! A step on values that are all at hand, with every input checked before anything runs.

use super::Session;
use crate::element::{ValueError, Values, View};
use crate::exchange::ExchangeError;
use crate::feed::Feed;
use crate::store::Store;
use kolo_graph::sources::Input;

/// Why a step did not run, or not to its end.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Values(#[from] ValueError),
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
}

impl Session {
    /// One whole step. Every input is given once: of a per-step input its values, of any other those of all grains, one
    /// grain after the other. Nothing runs unless all have the right type and length.
    pub fn step(&mut self, store: &mut Store, inputs: &[(&str, Values<'_>)]) -> Result<(), StepError> {
        self.check(inputs)?;
        let grains = self.options().grains;
        let write = |feed: &mut Feed<'_>, grain: usize, parts: usize| {
            let names: Vec<String> = feed.names().map(|(name, _)| name.to_string()).collect();
            for name in names {
                let Some((_, all)) = inputs.iter().find(|(key, _)| *key == name) else { continue };
                let len = all.bytes.len() / parts;
                let values = Values { dtype: all.dtype, bytes: &all.bytes[grain * len..(grain + 1) * len] };
                feed.set_values(&name, values).expect("types and lengths were checked");
            }
        };
        Ok(self.run(store, |feed| write(feed, 0, 1), |grain, feed| write(feed, grain, grains))?)
    }

    pub(crate) fn check(&self, inputs: &[(&str, Values<'_>)]) -> Result<(), ValueError> {
        let graph = self.graph();
        let known = || graph.inputs().map(|(id, op)| format!("`{}` ({})", op.name, graph.ty(id))).collect::<Vec<_>>();
        if let Some((name, _)) = inputs.iter().find(|(name, _)| graph.inputs().all(|(_, op)| op.name != *name)) {
            return Err(ValueError::Unknown { name: (*name).into(), known: known().join(", ") });
        }
        for (id, Input { name, per_step, .. }) in graph.inputs() {
            let ty = graph.ty(id).clone();
            let Some((_, values)) = inputs.iter().find(|(key, _)| key == name) else {
                return Err(ValueError::Absent { name: name.clone(), ty });
            };
            if values.dtype() != ty.dtype {
                return Err(ValueError::OtherType { name: name.clone(), ty, given: values.dtype() });
            }
            let (parts, hint) = match per_step {
                true => (1, "its shape was fixed when the graph was built"),
                false => (self.options().grains, "give the values of all grains, one grain after the other"),
            };
            let (wanted, given) = (ty.elements() * parts, values.len());
            if wanted != given {
                return Err(ValueError::OtherLength { name: name.clone(), ty, wanted, given, hint });
            }
        }
        Ok(())
    }

    /// A named output with its type and shape: the sum over grains or step value; for a value of one grain, that of lane
    /// 0's last grain.
    pub fn tensor(&self, name: &str) -> Option<View<'_>> {
        self.device.wait_outputs();
        let (name, buffer) = self.outputs.iter().find(|(key, _)| key == name)?;
        // SAFETY: the place holds its type's values, and nothing runs while `self` is borrowed.
        Some(unsafe { View::new(name, &buffer.ty, buffer.data) })
    }

    /// Every named output, in the order of the graph.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, View<'_>)> {
        self.outputs.iter().filter_map(|(name, _)| Some((name.as_str(), self.tensor(name)?)))
    }
}
