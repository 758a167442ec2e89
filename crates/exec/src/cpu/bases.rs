//! Where the arenas of a session start, and so where every value lies.

use crate::store::Store;
use kolo_graph::cpu::Buffer;
use kolo_graph::layout::{Arena, Layout};
use kolo_graph::sources::{Input, Param, State};
use kolo_graph::{Graph, ValueId};

pub(super) struct Bases<'a> {
    pub store: &'a Store,
    pub grain_input: *mut u8,
    pub step_input: *mut u8,
    pub grain: *mut u8,
    pub step: *mut u8,
    pub sum: *mut u8,
}

impl Bases<'_> {
    pub fn buffer(&self, graph: &Graph, layout: &Layout, id: ValueId) -> Buffer {
        let ty = graph.ty(id).clone();
        let Some(place) = layout.places[id.0 as usize] else {
            assert!(layout.is_unstored(graph, id), "a live value has a place");
            return Buffer { data: std::ptr::null_mut(), ty };
        };
        // SAFETY: the layout sized every arena to hold its places.
        let data = unsafe {
            match place.arena {
                Arena::Store => self.stored(graph, ValueId(place.offset as u32)),
                Arena::GrainInput => self.grain_input.add(place.offset),
                Arena::StepInput => self.step_input.add(place.offset),
                Arena::Grain => self.grain.add(place.offset),
                Arena::Step => self.step.add(place.offset),
                Arena::Sum => self.sum.add(place.offset),
                Arena::Host => unreachable!("the CPU has no other memory to leave anything in"),
            }
            .add(place.within)
        };
        Buffer { data, ty }
    }

    /// Where every value is that has a place.
    pub fn all(&self, graph: &Graph, layout: &Layout) -> Vec<Option<Buffer>> {
        let ids = (0..graph.values.len() as u32).map(ValueId);
        ids.map(|id| layout.places[id.0 as usize].map(|_| self.buffer(graph, layout, id))).collect()
    }

    fn stored(&self, graph: &Graph, id: ValueId) -> *mut u8 {
        let op = &graph.maker(id).op;
        let name = op.downcast::<Param>().map(|op| &op.name).or(op.downcast::<State>().map(|op| &op.name));
        let name = name.expect("only parameters and states are stored");
        let entry = self.store.entry(name).unwrap_or_else(|| panic!("the store has no `{name}`"));
        assert_eq!(entry.ty, *graph.ty(id), "`{name}` has another type in the store");
        self.store.address(entry)
    }
}

/// The inputs of a step or a grain, sorted by name.
pub(super) fn input_buffers(
    graph: &Graph,
    layout: &Layout,
    bases: &Bases<'_>,
    per_step: bool,
) -> Vec<(String, Buffer)> {
    let mut inputs: Vec<(String, Buffer)> = graph
        .sources::<Input>()
        .filter(|(id, input)| input.per_step == per_step && layout.places[id.0 as usize].is_some())
        .map(|(id, input)| (input.name.clone(), bases.buffer(graph, layout, id)))
        .collect();
    inputs.sort_by(|one, other| one.0.cmp(&other.0));
    inputs
}
