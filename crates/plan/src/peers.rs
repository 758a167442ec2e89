//! A step as other systems run it, from the step that kolo would run: what a cluster file says of them under `[system]`.

use crate::anatomy::{Anatomy, Unit};
use crate::op_cost::Body;
use crate::system::SystemTraits;
use kolo_parallel::Recompute;

impl Anatomy {
    /// Whether a system's step is counted from the graph in which nothing is computed again: its layers repeat their exchanges, too.
    pub fn repeats_whole_layers(system: &SystemTraits, recompute: Recompute) -> bool {
        system.repeats_exchanges && recompute == Recompute::Blocks
    }

    /// The same step as a system runs it whose layers compute this again.
    pub fn run_by(self, system: &SystemTraits, recompute: Recompute) -> Self {
        match recompute {
            Recompute::Blocks if system.repeats_exchanges => self.recomputing_layers(),
            Recompute::Selective if system.repeats_products > 0 => self.repeating_products(system.repeats_products),
            _ => self,
        }
    }

    /// The same step as systems run it that compute every layer again from its input, exchanges and all: of a graph in which nothing
    /// is computed again.
    fn recomputing_layers(&self) -> Self {
        let mut anatomy = self.clone();
        let ends = [self.order.first(), self.order.last()];
        for (at, unit) in anatomy.units.iter_mut().enumerate().filter(|(at, _)| !ends.contains(&Some(at))) {
            let Unit { forward, saved, handed_on, .. } = &self.units[at];
            unit.input.calls.extend(forward.calls.iter().copied());
            unit.input.exchanges.extend(forward.exchanges.iter().cloned());
            // A layer's input is as large as what it hands on. The rest of what it would keep is there while its turn lasts.
            unit.saved = *handed_on;
            unit.transient.reals += (saved.reals - handed_on.reals).max(0.0);
            unit.transient.bytes += (saved.bytes - handed_on.bytes).max(0.0);
        }
        anatomy
    }

    /// The same step with every so manieth product of a layer run again instead of being kept.
    fn repeating_products(mut self, every: usize) -> Self {
        let ends = [self.order.first().copied(), self.order.last().copied()];
        for (_, unit) in self.units.iter_mut().enumerate().filter(|(at, _)| !ends.contains(&Some(*at))) {
            let products = unit.forward.calls.iter().filter(|call| matches!(call.body, Body::Product { .. }));
            let again: Vec<_> = products.skip(every - 1).step_by(every).copied().collect();
            let made: f64 = again.iter().map(|call| result_of(&call.body)).sum();
            // Its input stays, whatever is computed again.
            let dropped = made.min(unit.saved.reals - unit.handed_on.reals).max(0.0);
            unit.saved.reals -= dropped;
            unit.transient.reals += dropped;
            unit.input.calls.extend(again);
        }
        self
    }
}

/// Numbers that a product makes.
fn result_of(body: &Body) -> f64 {
    match body {
        Body::Product { rows, columns, .. } => rows * columns,
        _ => 0.0,
    }
}
