//! What messages, bytes and additions cost on the live links: a few messages between pairs of ranks, in some
//! milliseconds, and the worst of all ranks' figures for everyone.

use crate::call::{CallKind, Fingerprint, short_name};
use crate::choose::{Costs, LinkCost};
use crate::combine::combine;
use crate::element::{ElementType, Reduction};
use crate::fault::Fault;
use crate::run::Programs;
use crate::task::CollectiveTask;
use crate::transport::Transport;
use crate::wire::SplitWire;
use std::time::Instant;

/// Round trips; the fastest counts.
const TRIPS: u32 = 12;
/// One-byte messages sent at once.
const BURST: usize = 16;
const BURSTS: u32 = 3;
const LARGE_BYTES: usize = 256 << 10;
const LARGE_TRIPS: u32 = 3;
/// Apart from every real communicator.
const COMMUNICATOR: u32 = u32::MAX;

impl<W: SplitWire> Programs<W> {
    /// Measures the links and chooses by the result from now on. All ranks call it together.
    pub fn measure(&mut self) -> Result<Costs, Fault> {
        let hosts = self.wire.hosts().to_vec();
        let rank = self.wire.rank();
        let mut buffer = vec![0u8; LARGE_BYTES];
        let mut figures = [0.0f64; 7];
        for (class, partner) in [partner_inside(&hosts, rank), partner_across(&hosts, rank)].into_iter().enumerate() {
            let Some(partner) = partner else { continue };
            // Each pair counts for itself: the other one may have had no partner before.
            let mut sequence = 0;
            let cost = self.measure_link(partner, &mut buffer, &mut sequence)?;
            figures[3 * class..3 * class + 3].copy_from_slice(&[cost.latency_s, cost.message_s, cost.byte_s]);
        }
        figures[6] = combine_seconds(&mut buffer) / (LARGE_BYTES / 2) as f64;
        let bytes = size_of_val(&figures);
        let input = figures.as_ptr().cast();
        let task = CollectiveTask {
            input,
            input_bytes: bytes,
            output: figures.as_mut_ptr().cast(),
            output_bytes: bytes,
            ..blank(CallKind::AllReduce, ElementType::F64, 0, figures.len())
        };
        // SAFETY: an array of ours, in place.
        unsafe { self.run(&task)? };
        let mut costs = Costs { combine_byte_s: figures[6], ..self.costs() };
        for (class, link) in [&mut costs.inside, &mut costs.across].into_iter().enumerate() {
            if let [latency_s, message_s, byte_s] = figures[3 * class..3 * class + 3]
                && latency_s > 0.0
            {
                *link = LinkCost { latency_s, message_s, byte_s };
            }
        }
        self.set_costs(costs);
        Ok(costs)
    }

    fn measure_link(&mut self, partner: usize, buffer: &mut [u8], sequence: &mut u64) -> Result<LinkCost, Fault> {
        let mut fastest = |programs: &mut Self, trips: u32, there: usize, back: usize| {
            let mut least = f64::MAX;
            for _ in 0..trips {
                least = least.min(programs.trip(partner, &mut buffer[..there.max(back)], [there, back], sequence)?);
            }
            Ok::<f64, Fault>(least)
        };
        let short = fastest(self, TRIPS, 1, 1)?;
        let segment_bytes = self.replace_segment_bytes(1);
        let burst = fastest(self, BURSTS, BURST, 1);
        self.replace_segment_bytes(segment_bytes);
        let large = fastest(self, LARGE_TRIPS, LARGE_BYTES, LARGE_BYTES)?;
        let more = |seconds: f64, by: usize| (seconds - short).max(0.0) / by as f64;
        Ok(LinkCost {
            latency_s: short / 2.0,
            message_s: more(burst?, BURST - 1),
            byte_s: more(large, 2 * LARGE_BYTES),
        })
    }

    /// There and back; the lower rank begins. Seconds.
    fn trip(
        &mut self,
        partner: usize,
        buffer: &mut [u8],
        [there, back]: [usize; 2],
        sequence: &mut u64,
    ) -> Result<f64, Fault> {
        let begins = self.wire.rank() < partner;
        let kinds = if begins { [CallKind::Send, CallKind::Recv] } else { [CallKind::Recv, CallKind::Send] };
        let start = Instant::now();
        for (kind, bytes) in kinds.into_iter().zip([there, back]) {
            let receiver = if kind == CallKind::Send { partner } else { self.wire.rank() };
            let mut task = blank(kind, ElementType::U8, *sequence, bytes);
            task.fingerprint.root = receiver as u32;
            task.peer = partner;
            if kind == CallKind::Send {
                (task.input, task.input_bytes) = (buffer.as_ptr(), bytes);
            } else {
                (task.output, task.output_bytes) = (buffer.as_mut_ptr(), bytes);
            }
            // SAFETY: the buffer holds the longer of both.
            unsafe { self.run(&task)? };
            *sequence += 1;
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

fn blank(kind: CallKind, element: ElementType, sequence: u64, count: usize) -> CollectiveTask<'static> {
    CollectiveTask {
        fingerprint: Fingerprint {
            communicator: COMMUNICATOR,
            kind,
            element,
            reduction: Reduction::Max,
            root: 0,
            sequence,
            count: count as u64,
            name: short_name("measure"),
        },
        input: std::ptr::null(),
        output: std::ptr::null_mut(),
        input_bytes: 0,
        output_bytes: 0,
        send: &[],
        recv: &[],
        peer: 0,
        reproducible: true,
    }
}

/// Neighbours on one host, two by two.
fn partner_inside(hosts: &[usize], rank: usize) -> Option<usize> {
    let local: Vec<usize> = (0..hosts.len()).filter(|other| hosts[*other] == hosts[rank]).collect();
    let at = local.iter().position(|member| *member == rank)?;
    local.get(at ^ 1).copied()
}

/// First ranks of hosts, two by two.
fn partner_across(hosts: &[usize], rank: usize) -> Option<usize> {
    let first = |rank: &usize| !hosts[..*rank].contains(&hosts[*rank]);
    let firsts: Vec<usize> = (0..hosts.len()).filter(first).collect();
    let at = firsts.iter().position(|member| *member == rank)?;
    firsts.get(at ^ 1).copied()
}

fn combine_seconds(buffer: &mut [u8]) -> f64 {
    let (left, right) = buffer.split_at_mut(LARGE_BYTES / 2);
    let mut least = f64::MAX;
    for _ in 0..TRIPS {
        let start = Instant::now();
        let into = left.as_mut_ptr();
        // SAFETY: two halves of one buffer.
        unsafe { combine(ElementType::F32, Reduction::Sum, into, right.as_ptr(), into, LARGE_BYTES / 8) };
        least = least.min(start.elapsed().as_secs_f64());
    }
    least
}
