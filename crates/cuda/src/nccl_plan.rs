//! An exchange as steps of NCCL: messages in groups, its own collectives, and sums of our own in the promised order.
//!
//! NCCL adds in an order that depends on the number of ranks and on the links between them. So a sum whose bits are promised is a direct
//! exchange: every rank gets its part of all others, adds them as one balanced tree over ranks, and all parts are gathered. Parts are
//! taken in segments, so that the scratch memory stays small.

use crate::driver::DevicePointer;
use kolo_exec::{Exchange, ExchangeKind, GroupPlace};
use kolo_graph::DType;

/// An address on the device, or an offset in the scratch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spot {
    At(DevicePointer),
    Scratch(usize),
}

/// So many elements to a rank, or from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub peer: usize,
    pub spot: Spot,
    pub elements: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// All at once.
    Messages {
        sent: Vec<Message>,
        received: Vec<Message>,
    },
    /// Adds this rank's elements and those in the slots of the others.
    Add {
        own: DevicePointer,
        slot_elements: usize,
        to: DevicePointer,
        elements: usize,
    },
    /// NCCL's own collectives.
    AllReduce {
        from: DevicePointer,
        to: DevicePointer,
        elements: usize,
    },
    ReduceScatter {
        from: DevicePointer,
        to: DevicePointer,
        part_elements: usize,
    },
    AllGather {
        from: DevicePointer,
        to: DevicePointer,
        part_elements: usize,
    },
}

/// What one exchange is for one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExchangePlan {
    pub dtype: DType,
    pub steps: Vec<Step>,
    pub scratch_bytes: usize,
}

/// Offset and count of a rank's part, in elements.
type Part = (usize, usize);

/// Elements of a slot are a multiple of this many, so that slots can be read 16 bytes at a time.
const SLOT_ELEMENTS: usize = 64;

impl ExchangePlan {
    /// The steps of an exchange, whose sums take at most so many bytes of scratch memory for each 64 elements and rank.
    pub fn new(exchange: &Exchange, place: GroupPlace, reproducible: bool, scratch_bytes_max: usize) -> Self {
        let drawn = Drawing { exchange, place, scratch_bytes_max };
        let (input, output) = (exchange.input as DevicePointer, exchange.output as DevicePointer);
        let (elements, whole) = (exchange.elements, equal_parts(exchange.elements, place.size));
        let parts = &exchange.parts[..];
        let own = drawn.own(parts);
        let steps = match exchange.kind {
            ExchangeKind::AllReduce if !reproducible => vec![Step::AllReduce { from: input, to: output, elements }],
            ExchangeKind::AllReduce => {
                let to = drawn.at(output, whole[place.rank].0);
                let mut steps = drawn.reduce(&whole, to);
                steps.extend(drawn.gather(&whole, to, output));
                steps
            }
            ExchangeKind::ReduceScatter => match in_order(parts) {
                Some(part_elements) if !reproducible => {
                    vec![Step::ReduceScatter { from: input, to: drawn.at(output, own), part_elements }]
                }
                _ => drawn.reduce(parts, drawn.at(output, own)),
            },
            ExchangeKind::AllGather => drawn.gather(parts, drawn.at(input, own), output),
            ExchangeKind::AllToAll => drawn.each_to_each(parts, parts),
            ExchangeKind::EachToEach => drawn.each_to_each(&parts[..place.size], &parts[place.size..]),
            ExchangeKind::Shift(by) => {
                let only = |at: usize| (0..place.size).map(|rank| (0, if rank == at { elements } else { 0 })).collect();
                let (to, from) = ((place.rank + by) % place.size, (place.rank + place.size - by) % place.size);
                let (sent, received): (Vec<Part>, Vec<Part>) = (only(to), only(from));
                drawn.each_to_each(&sent, &received)
            }
            ExchangeKind::Send(peer) => messages(vec![Message { peer, spot: Spot::At(input), elements }], Vec::new()),
            ExchangeKind::Receive(peer) => {
                messages(Vec::new(), vec![Message { peer, spot: Spot::At(output), elements }])
            }
            // Nobody has come before all have sent something.
            ExchangeKind::Barrier => drawn.barrier(),
        };
        let slots = steps.iter().map(|step| match step {
            Step::Add { slot_elements, .. } => slot_elements * place.size,
            Step::Messages { .. } if exchange.kind == ExchangeKind::Barrier => 2 * SLOT_ELEMENTS * place.size,
            _ => 0,
        });
        let scratch_bytes = slots.max().unwrap_or(0) * exchange.dtype.bytes();
        Self { dtype: exchange.dtype, steps, scratch_bytes }
    }
}

struct Drawing<'a> {
    exchange: &'a Exchange,
    place: GroupPlace,
    scratch_bytes_max: usize,
}

impl Drawing<'_> {
    fn bytes(&self) -> usize {
        self.exchange.dtype.bytes()
    }

    fn at(&self, base: DevicePointer, elements: usize) -> DevicePointer {
        base + (elements * self.bytes()) as u64
    }

    /// The offset of this rank's part where input and output are one memory; it is all of a memory of its own.
    fn own(&self, parts: &[Part]) -> usize {
        let in_place = self.exchange.input == self.exchange.output;
        parts.get(self.place.rank).map_or(0, |part| if in_place { part.0 } else { 0 })
    }

    /// This rank's part of all inputs, added up in the promised order.
    fn reduce(&self, parts: &[Part], to: DevicePointer) -> Vec<Step> {
        let GroupPlace { rank, size } = self.place;
        let most = parts.iter().map(|part| part.1).max().unwrap_or(0);
        let capacity = self.scratch_bytes_max / (size * self.bytes()) / SLOT_ELEMENTS * SLOT_ELEMENTS;
        let segment = most.next_multiple_of(SLOT_ELEMENTS).min(capacity.max(SLOT_ELEMENTS));
        let input = self.exchange.input as DevicePointer;
        let others = || (0..size).filter(|other| *other != rank);
        let mut steps = Vec::new();
        for done in (0..most).step_by(segment.max(1)) {
            let left = |rank: usize| parts[rank].1.saturating_sub(done).min(segment);
            let sent = others().map(|peer| {
                let spot = Spot::At(self.at(input, parts[peer].0 + done));
                Message { peer, spot, elements: left(peer) }
            });
            let received = others().map(|peer| Message {
                peer,
                spot: Spot::Scratch(peer * segment * self.bytes()),
                elements: left(rank),
            });
            steps.extend(messages(sent.collect(), received.collect()));
            if left(rank) > 0 {
                let own = self.at(input, parts[rank].0 + done);
                let (slot_elements, elements) = (segment, left(rank));
                steps.push(Step::Add { own, slot_elements, to: self.at(to, done), elements });
            }
        }
        steps
    }

    /// Every rank's part, everywhere.
    fn gather(&self, parts: &[Part], from: DevicePointer, to: DevicePointer) -> Vec<Step> {
        if let Some(part_elements) = in_order(parts) {
            return if part_elements == 0 { Vec::new() } else { vec![Step::AllGather { from, to, part_elements }] };
        }
        let GroupPlace { rank, size } = self.place;
        let all = |spot: &dyn Fn(usize) -> (DevicePointer, usize)| -> Vec<Message> {
            let message = |peer: usize| Message { peer, spot: Spot::At(spot(peer).0), elements: spot(peer).1 };
            // What is in its place already does not travel.
            let stays = from == self.at(to, parts[rank].0);
            (0..size).filter(|peer| *peer != rank || !stays).map(message).collect()
        };
        messages(all(&|_| (from, parts[rank].1)), all(&|peer| (self.at(to, parts[peer].0), parts[peer].1)))
    }

    /// To each rank its part of the input, from each its part of the output.
    fn each_to_each(&self, sent: &[Part], received: &[Part]) -> Vec<Step> {
        let all = |base: *mut u8, parts: &[Part]| -> Vec<Message> {
            let spot = |part: &Part| Spot::At(self.at(base as DevicePointer, part.0));
            let message = |(peer, part): (usize, &Part)| Message { peer, spot: spot(part), elements: part.1 };
            parts.iter().enumerate().map(message).collect()
        };
        messages(all(self.exchange.input, sent), all(self.exchange.output, received))
    }

    /// One element to everybody and from everybody.
    fn barrier(&self) -> Vec<Step> {
        let GroupPlace { rank, size } = self.place;
        let slot = |at: usize| Spot::Scratch(at * SLOT_ELEMENTS * self.bytes());
        let all = |first: usize| -> Vec<Message> {
            let others = (0..size).filter(|peer| *peer != rank);
            others.map(|peer| Message { peer, spot: slot(first + peer), elements: 1 }).collect()
        };
        messages(all(0), all(size))
    }
}

/// One group, if anything travels.
fn messages(sent: Vec<Message>, received: Vec<Message>) -> Vec<Step> {
    let full = |messages: Vec<Message>| -> Vec<Message> {
        messages.into_iter().filter(|message| message.elements > 0).collect()
    };
    let (sent, received) = (full(sent), full(received));
    if sent.is_empty() && received.is_empty() { Vec::new() } else { vec![Step::Messages { sent, received }] }
}

/// Parts of so many elements: the first ranks take one more if there is a rest.
fn equal_parts(elements: usize, ranks: usize) -> Vec<Part> {
    let (each, rest) = (elements / ranks, elements % ranks);
    (0..ranks).map(|rank| (rank * each + rank.min(rest), each + usize::from(rank < rest))).collect()
}

/// The elements of each part, if all have as many and lie one behind the other.
fn in_order(parts: &[Part]) -> Option<usize> {
    let each = parts.first()?.1;
    parts.iter().enumerate().all(|(rank, part)| *part == (rank * each, each)).then_some(each)
}
