//! Where values are on the host that others read or write there: named results, and what is exchanged with other ranks.

use crate::driver::DevicePointer;
use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::memory::{self, pinned};
use crate::places::Arenas;
use kolo_exec::schedule::Schedule;
use kolo_exec::{Memory, Program, Store};
use kolo_graph::cpu::Buffer;
use kolo_graph::layout::{Arena, align};
use kolo_graph::{NodeId, Phase, ValueId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A value on both sides.
#[derive(Clone, Debug)]
pub(crate) struct HostPlace {
    pub host: Buffer,
    /// `None` of what the host alone has.
    pub device: Option<DevicePointer>,
}

/// A run of bytes on both sides.
#[derive(Clone, Copy, Debug)]
struct Run {
    host: usize,
    device: DevicePointer,
    bytes: usize,
}

/// What an exchange reads and writes.
#[derive(Debug, Default)]
struct Moved {
    reads: Vec<Run>,
    writes: Vec<Run>,
}

#[derive(Debug)]
pub(crate) struct HostPlaces {
    places: BTreeMap<(ValueId, usize), HostPlace>,
    exchanges: BTreeMap<(NodeId, usize), Moved>,
    /// The named results, and whether each is made after the grains.
    outputs: Vec<(HostPlace, bool)>,
    /// Where the sums over grains are on the host.
    pub sums: Option<Memory>,
    _memory: Memory,
}

/// Values in one place of an arena share their memory on the host, as on the device.
type Key = (Arena, usize, usize);

impl HostPlaces {
    pub fn new(
        gpu: &Arc<Gpu>,
        program: &Program,
        schedule: &Schedule,
        store: &Store,
        arenas: &Arenas,
        sums: Option<Memory>,
    ) -> Result<Self, CudaError> {
        let graph = &program.graph;
        let wanted = wanted(program, schedule);
        let mut offsets: BTreeMap<Key, (usize, usize)> = BTreeMap::new();
        for (id, lane) in &wanted {
            if let Some((key, bytes)) = own_place(program, *id, *lane, sums.is_some()) {
                let place = offsets.entry(key).or_default();
                place.1 = place.1.max(bytes);
            }
        }
        let mut total = 0;
        for (offset, bytes) in offsets.values_mut() {
            *offset = total;
            total += align(*bytes);
        }
        let memory = pinned(gpu, total)?;
        let mut places = BTreeMap::new();
        for (id, lane) in wanted {
            let Some(place) = program.layout.places[id.0 as usize] else { continue };
            let data = match own_place(program, id, lane, sums.is_some()) {
                Some((key, _)) => memory.at(offsets[&key].0 + place.within),
                None => match (&sums, place.arena) {
                    (Some(sums), Arena::Sum) => sums.at(place.offset + place.within),
                    _ => arenas.mirror.host_address(graph, store, &place),
                },
            };
            let device = arenas.address(program, store, id, lane);
            places.insert((id, lane), HostPlace { host: Buffer { data, ty: graph.ty(id).clone() }, device });
        }
        let phases = graph.phases();
        let output = |(_, id): &(String, ValueId)| {
            let late = phases[graph.value(*id).node.0 as usize] == Phase::After;
            places.get(&(*id, 0)).map(|place| (place.clone(), late))
        };
        let outputs = graph.outputs.iter().filter_map(output).collect();
        let mut made = Self { places, exchanges: BTreeMap::new(), outputs, sums, _memory: memory };
        made.find_exchanges(program, schedule);
        Ok(made)
    }

    fn find_exchanges(&mut self, program: &Program, schedule: &Schedule) {
        for item in &schedule.exchanges {
            let node = program.graph.node(item.node);
            for lane in lanes_of(program, item.phase) {
                let runs = |ids: &[ValueId]| {
                    let places = ids.iter().filter_map(|id| self.places.get(&(*id, lane)));
                    joined(places.filter_map(|place| {
                        let (host, bytes) = (place.host.data as usize, place.host.ty.bytes());
                        Some(Run { host, device: place.device?, bytes })
                    }))
                };
                let moved = Moved { reads: runs(&node.inputs), writes: runs(&node.outputs) };
                self.exchanges.insert((item.node, lane), moved);
            }
        }
    }

    pub fn get(&self, id: ValueId, lane: usize) -> Option<&HostPlace> {
        self.places.get(&(id, lane))
    }

    /// Starts to copy the named results to the host: all, or those made after the grains.
    pub fn download_outputs(&self, gpu: &Gpu, late_only: bool) -> Result<(), CudaError> {
        for (place, late) in &self.outputs {
            if let Some(device) = place.device.filter(|_| *late || !late_only) {
                memory::download(gpu, device, place.host.data, place.host.ty.bytes())?;
            }
        }
        Ok(())
    }

    /// Brings to the host what an exchange reads, and waits for it.
    pub fn publish(&self, gpu: &Gpu, node: NodeId, lane: usize) -> Result<(), CudaError> {
        let Some(moved) = self.moved(node, lane) else { return Ok(()) };
        for run in &moved.reads {
            memory::download(gpu, run.device, run.host as *mut u8, run.bytes)?;
        }
        gpu.synchronize()
    }

    /// Brings to the device what an exchange has written.
    pub fn absorb(&self, gpu: &Gpu, node: NodeId, lane: usize) -> Result<(), CudaError> {
        let Some(moved) = self.moved(node, lane) else { return Ok(()) };
        moved.writes.iter().try_for_each(|run| memory::upload(gpu, run.host as *const u8, run.device, run.bytes))
    }

    /// What happens once per step is shown on the lane after the last.
    fn moved(&self, node: NodeId, lane: usize) -> Option<&Moved> {
        self.exchanges.get(&(node, lane)).or_else(|| self.exchanges.get(&(node, 0)))
    }
}

fn lanes_of(program: &Program, phase: Phase) -> std::ops::Range<usize> {
    if phase == Phase::Grain { 0..program.options.places() } else { 0..1 }
}

/// Values that need a place on the host, by lane.
fn wanted(program: &Program, schedule: &Schedule) -> BTreeSet<(ValueId, usize)> {
    let graph = &program.graph;
    let mut wanted: BTreeSet<(ValueId, usize)> = graph.outputs.iter().map(|(_, id)| (*id, 0)).collect();
    if !schedule.on_device {
        wanted.extend(exchanged(program, schedule));
    }
    wanted
}

/// Where values are that are exchanged in memory of the device, by lane; none if they are exchanged on the host.
pub(crate) fn addresses(
    program: &Program,
    schedule: &Schedule,
    store: &Store,
    arenas: &Arenas,
) -> BTreeMap<(ValueId, usize), DevicePointer> {
    let values = exchanged(program, schedule).into_iter().filter(|_| schedule.on_device);
    values.filter_map(|(id, lane)| Some(((id, lane), arenas.address(program, store, id, lane)?))).collect()
}

/// Values that are exchanged, by lane.
fn exchanged(program: &Program, schedule: &Schedule) -> BTreeSet<(ValueId, usize)> {
    let mut exchanged = BTreeSet::new();
    for item in &schedule.exchanges {
        let node = program.graph.node(item.node);
        for lane in lanes_of(program, item.phase) {
            exchanged.extend(node.inputs.iter().chain(&node.outputs).map(|id| (*id, lane)));
        }
    }
    exchanged
}

/// The place of a value whose memory on the host is made here, and the bytes up to its end.
fn own_place(program: &Program, id: ValueId, lane: usize, has_sums: bool) -> Option<(Key, usize)> {
    let place = program.layout.places[id.0 as usize]?;
    let elsewhere = place.arena == Arena::Store || place.arena == Arena::Sum && has_sums;
    let bytes = place.within + program.graph.ty(id).bytes();
    (!elsewhere).then_some(((place.arena, lane, place.offset), bytes))
}

/// Runs in the order of memory, those that lie side by side as one.
fn joined(runs: impl Iterator<Item = Run>) -> Vec<Run> {
    let mut runs: Vec<Run> = runs.filter(|run| run.bytes > 0).collect();
    runs.sort_by_key(|run| run.host);
    let mut joined: Vec<Run> = Vec::new();
    for run in runs {
        if let Some(last) = joined.last_mut() {
            // With the padding between them, if it is the same on both sides.
            let (host, device) = (run.host - last.host, run.device.wrapping_sub(last.device));
            if host as u64 == device && host <= align(last.bytes) {
                last.bytes = last.bytes.max(host + run.bytes);
                continue;
            }
        }
        joined.push(run);
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_copied_as_one() {
        let run = |host: usize, device: u64, bytes: usize| Run { host, device, bytes };
        let found = joined(
            [run(128, 1128, 4), run(0, 1000, 100), run(192, 5000, 8), run(200, 5008, 8), run(0, 1000, 64)].into_iter(),
        );
        let found: Vec<_> = found.iter().map(|run| (run.host, run.device, run.bytes)).collect();
        assert_eq!(found, [(0, 1000, 132), (192, 5000, 16)]);
    }
}
