//! Putting a state together from what several ranks hold of it: who has which elements, after which step, and who sends
//! what to whom.
//!
//! All ranks tell what they hold and what they want, and each computes the same plan from it.

use crate::error::Error;
use crate::together;
use kolo_comm::Communicator;
use kolo_exec::Store;
use kolo_exec::store::Entry;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes that are sent at a time, by all ranks together, so that what is on its way takes little memory.
const ROUND_BYTES: usize = 64 << 20;
/// Bytes that one rank sends in one piece, so that all who hold a tensor send some of it.
const MOVE_BYTES: usize = 4 << 20;

/// Elements of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Run {
    pub tensor: String,
    pub start: usize,
    pub elements: usize,
    /// Elements of the whole tensor.
    pub whole: usize,
    /// Bytes of an element.
    pub size: usize,
}

impl Run {
    pub fn of(entry: &Entry) -> Self {
        let whole = entry.whole.iter().product();
        // Whoever has runs apart shares the model, and such a job is not elastic.
        let (tensor, start, size) = (entry.tensor.clone(), entry.region.start, entry.ty.dtype.bytes());
        Self { tensor, start, elements: entry.ty.elements(), whole, size }
    }

    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.elements
    }
}

/// Elements of a tensor, with their values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub run: Run,
    pub bytes: Vec<u8>,
}

/// Parts of the state after this step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holding {
    pub step: usize,
    pub parts: Vec<Part>,
}

impl Holding {
    /// All that a store has.
    pub fn of(store: &Store, step: usize) -> Self {
        let part = |(number, entry)| Part { run: Run::of(entry), bytes: store.bytes_of(number).to_vec() };
        Self { step, parts: store.entries().iter().enumerate().map(part).collect() }
    }
}

/// What a rank tells the others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Offer {
    /// What it holds, by step.
    pub held: Vec<(usize, Vec<Run>)>,
    pub wanted: Vec<Run>,
}

impl Offer {
    pub fn new(held: &[Holding], wanted: Vec<Run>) -> Self {
        let runs = |holding: &Holding| holding.parts.iter().map(|part| part.run.clone()).collect();
        Self { held: held.iter().map(|holding| (holding.step, runs(holding))).collect(), wanted }
    }

    fn runs(&self, step: usize) -> impl Iterator<Item = &Run> {
        self.held.iter().filter(move |(of, _)| *of == step).flat_map(|(_, runs)| runs)
    }
}

/// The offers of all ranks.
pub(crate) fn gather(world: &Communicator, mine: &Offer) -> Result<Vec<Offer>, Error> {
    let text = serde_json::to_vec(mine).map_err(|error| Error::bug(&error))?;
    let all = together::gather_bytes(Some(world), &text)?;
    all.iter().map(|text| serde_json::from_slice(text).map_err(|error| Error::bug(&error))).collect()
}

/// The state that can be put together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Nobody holds anything.
    Nothing,
    After(usize),
    /// The newest state lacks this element, and the one before lacks another.
    Missing {
        step: usize,
        tensor: String,
        element: usize,
    },
}

/// The newest state of which all that is wanted is there. It is at most a step behind the newest of which there is anything.
pub(crate) fn choose(offers: &[Offer]) -> Choice {
    let steps = offers.iter().flat_map(|offer| &offer.held).map(|(step, _)| *step);
    let Some(newest) = steps.max() else { return Choice::Nothing };
    let Some((tensor, element)) = missing(offers, newest) else { return Choice::After(newest) };
    match newest.checked_sub(1) {
        Some(before) if missing(offers, before).is_none() => Choice::After(before),
        _ => Choice::Missing { step: newest, tensor, element },
    }
}

/// The first element that is wanted and that nobody holds.
fn missing(offers: &[Offer], step: usize) -> Option<(String, usize)> {
    let table = Holders::new(offers, step);
    let wanted = offers.iter().flat_map(|offer| &offer.wanted);
    wanted.into_iter().find_map(|run| {
        let gap = gaps(run.range(), table.ranges(&run.tensor, |_| true)).into_iter().next()?;
        Some((run.tensor.clone(), gap.start))
    })
}

/// All tensors that anybody holds anything of, whole.
pub(crate) fn whole_tensors(offers: &[Offer]) -> Vec<Run> {
    let runs = offers.iter().flat_map(|offer| &offer.held).flat_map(|(_, runs)| runs);
    let whole = |run: &Run| Run { start: 0, elements: run.whole, ..run.clone() };
    let tensors: BTreeMap<&str, Run> = runs.map(|run| (run.tensor.as_str(), whole(run))).collect();
    tensors.into_values().collect()
}

/// Who holds what of each tensor after a step.
struct Holders<'o>(BTreeMap<&'o str, Vec<(usize, Range<usize>)>>);

impl<'o> Holders<'o> {
    fn new(offers: &'o [Offer], step: usize) -> Self {
        let mut table: BTreeMap<&str, Vec<(usize, Range<usize>)>> = BTreeMap::new();
        for (rank, offer) in offers.iter().enumerate() {
            for run in offer.runs(step) {
                table.entry(&run.tensor).or_default().push((rank, run.range()));
            }
        }
        table.values_mut().for_each(|held| held.sort_by_key(|(rank, range)| (range.start, *rank)));
        Self(table)
    }

    fn of(&self, tensor: &str) -> &[(usize, Range<usize>)] {
        self.0.get(tensor).map_or(&[], Vec::as_slice)
    }

    /// What the chosen ranks hold, by its start.
    fn ranges(&self, tensor: &str, chosen: impl Fn(usize) -> bool) -> impl Iterator<Item = Range<usize>> {
        self.of(tensor).iter().filter(move |(rank, _)| chosen(*rank)).map(|(_, range)| range.clone())
    }
}

/// What is left of `run` without these ranges, which are in order of their starts.
fn gaps(run: Range<usize>, ranges: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let (mut gaps, mut at) = (Vec::new(), run.start);
    for range in ranges {
        if range.start > at {
            gaps.push(at..range.start.min(run.end));
        }
        at = at.max(range.end);
        if at >= run.end {
            return gaps.into_iter().filter(|gap| !gap.is_empty()).collect();
        }
    }
    gaps.push(at..run.end);
    gaps.into_iter().filter(|gap| !gap.is_empty()).collect()
}

/// Elements that one rank sends another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    from: usize,
    to: usize,
    run: Run,
}

/// How every rank gets what it wants and does not hold itself.
pub(crate) fn plan(offers: &[Offer], step: usize) -> Vec<Move> {
    let table = Holders::new(offers, step);
    let mut load = vec![0; offers.len()];
    let mut moves = Vec::new();
    for (to, offer) in offers.iter().enumerate() {
        for run in &offer.wanted {
            let most = (MOVE_BYTES / run.size.max(1)).max(1);
            for gap in gaps(run.range(), table.ranges(&run.tensor, |rank| rank == to)) {
                let mut at = gap.start;
                while at < gap.end {
                    let holds = |(_, range): &&(usize, Range<usize>)| range.contains(&at);
                    let holders = table.of(&run.tensor).iter().filter(holds);
                    // Whoever has sent the least so far.
                    let Some((from, range)) = holders.min_by_key(|(rank, _)| (load[*rank], *rank)) else { break };
                    let elements = range.end.min(gap.end).min(at + most) - at;
                    load[*from] += elements * run.size;
                    moves.push(Move { from: *from, to, run: Run { start: at, elements, ..run.clone() } });
                    at += elements;
                }
            }
        }
    }
    moves
}

/// Lets the first `keepers` ranks want, in equal parts, what only the others hold.
pub(crate) fn share_out(offers: &mut [Offer], step: usize, keepers: usize) {
    let mut wanted = vec![Vec::new(); keepers];
    let mut load = vec![0; keepers];
    let table = Holders::new(offers, step);
    for run in whole_tensors(offers) {
        let most = (MOVE_BYTES / run.size.max(1)).max(1);
        for gap in gaps(run.range(), table.ranges(&run.tensor, |rank| rank < keepers)) {
            for start in gap.clone().step_by(most) {
                let elements = most.min(gap.end - start);
                let Some(keeper) = (0..keepers).min_by_key(|rank| load[*rank]) else { return };
                load[keeper] += elements * run.size;
                wanted[keeper].push(Run { start, elements, ..run.clone() });
            }
        }
    }
    offers.iter_mut().for_each(|offer| offer.wanted.clear());
    offers.iter_mut().zip(wanted).for_each(|(offer, wanted)| offer.wanted = wanted);
}

/// Carries a plan out, with what this rank holds; `sink` is given what comes. All ranks call it together.
pub(crate) fn perform(
    world: &Communicator,
    moves: &[Move],
    mine: &[&Part],
    mut sink: impl FnMut(Run, &[u8]),
) -> Result<(), Error> {
    let mut by_tensor: BTreeMap<&str, Vec<&Part>> = BTreeMap::new();
    mine.iter().for_each(|part| by_tensor.entry(part.run.tensor.as_str()).or_default().push(part));
    for round in rounds(moves) {
        let (mut sent, mut send) = (Vec::new(), vec![0; world.size()]);
        let mut outgoing: Vec<&Move> = round.iter().filter(|one| one.from == world.rank()).collect();
        outgoing.sort_by_key(|one| one.to);
        for Move { to, run, .. } in outgoing {
            let parts = by_tensor.get(run.tensor.as_str()).into_iter().flatten();
            let mut holding =
                parts.filter(|part| part.run.start <= run.start && part.run.range().end >= run.range().end);
            let Some(part) = holding.next() else { continue };
            let from = (run.start - part.run.start) * run.size;
            sent.extend_from_slice(&part.bytes[from..from + run.elements * run.size]);
            send[*to] += run.elements * run.size;
        }
        let mut incoming: Vec<&Move> = round.iter().filter(|one| one.to == world.rank()).collect();
        incoming.sort_by_key(|one| one.from);
        let mut recv = vec![0; world.size()];
        incoming.iter().for_each(|one| recv[one.from] += one.run.elements * one.run.size);
        let mut received = vec![0u8; recv.iter().sum()];
        world.all_to_all_v(&sent, &send, &mut received, &recv)?;
        let mut rest = &received[..];
        for Move { run, .. } in incoming {
            let (bytes, others) = rest.split_at(run.elements * run.size);
            rest = others;
            sink(run.clone(), bytes);
        }
    }
    Ok(())
}

/// Moves that are made at a time.
fn rounds(moves: &[Move]) -> Vec<&[Move]> {
    let (mut rounds, mut first, mut bytes) = (Vec::new(), 0, 0);
    for (at, Move { run, .. }) in moves.iter().enumerate() {
        let more = run.elements * run.size;
        if bytes + more > ROUND_BYTES && at > first {
            rounds.push(&moves[first..at]);
            (first, bytes) = (at, 0);
        }
        bytes += more;
    }
    if first < moves.len() {
        rounds.push(&moves[first..]);
    }
    rounds
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_comm::{Watch, thread};
    use std::collections::BTreeSet;
    use std::sync::Arc;

    fn run(tensor: &str, range: Range<usize>) -> Run {
        Run { tensor: tensor.into(), start: range.start, elements: range.len(), whole: 12, size: 1 }
    }

    fn part(tensor: &str, range: Range<usize>) -> Part {
        Part { run: run(tensor, range.clone()), bytes: range.map(|at| at as u8).collect() }
    }

    fn holding(step: usize, parts: Vec<Part>) -> Holding {
        Holding { step, parts }
    }

    /// Three of four ranks are left. Each holds its own quarter of `m` and that of the rank before, after two steps.
    fn held(rank: usize) -> Vec<Holding> {
        let quarter = |rank: usize| part("m", 3 * rank..3 * rank + 3);
        let parts = || vec![quarter(rank), quarter((rank + 3) % 4), part("w", 0..12)];
        vec![holding(7, parts()), holding(8, parts())]
    }

    #[test]
    fn the_newest_state_that_is_whole_is_chosen() {
        let want = |held: Vec<Holding>| Offer::new(&held, vec![run("m", 0..12), run("w", 0..12)]);
        let mut offers: Vec<Offer> = [0, 1, 3].map(held).map(want).into();
        assert_eq!(choose(&offers), Choice::After(8), "the buddy has the lost rank's quarter");
        // The buddy has only what was before the last step: all go back.
        offers[2].held.retain(|(step, _)| *step == 7);
        assert_eq!(choose(&offers), Choice::After(7));
        // A rank and its buddy are lost.
        offers.pop();
        assert_eq!(choose(&offers), Choice::Missing { step: 8, tensor: "m".into(), element: 6 });
        // What is older than a step is of no use.
        offers[0].held.push((5, vec![run("m", 0..12), run("w", 0..12)]));
        assert!(matches!(choose(&offers), Choice::Missing { step: 8, .. }));
        assert_eq!(choose(&[Offer::default(), Offer::default()]), Choice::Nothing);
    }

    fn together<T: Send + 'static>(ranks: usize, work: impl Fn(&Communicator) -> T + Send + Sync + 'static) -> Vec<T> {
        let watches: Vec<Arc<Watch>> = (0..ranks).map(|_| Watch::alone()).collect();
        let work = Arc::new(work);
        let threads: Vec<_> = thread::world(&watches)
            .into_iter()
            .zip(&watches)
            .map(|(transport, watch)| {
                let (world, work) = (Communicator::new(transport, Arc::clone(watch), true), Arc::clone(&work));
                std::thread::spawn(move || work(&world))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    #[test]
    fn every_rank_gets_what_it_wants() {
        // One has joined and holds nothing; each wants another third, and all of `w`.
        let filled = together(4, |world| {
            let held = if world.rank() < 3 { held([0, 1, 3][world.rank()]) } else { Vec::new() };
            let third = world.rank() % 3 * 4..world.rank() % 3 * 4 + 4;
            let offers = gather(world, &Offer::new(&held, vec![run("m", third.clone()), run("w", 0..12)])).unwrap();
            let moves = plan(&offers, 8);
            let mine: Vec<Part> = held.into_iter().filter(|one| one.step == 8).flat_map(|one| one.parts).collect();
            let mut got: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
            let mut note = |run: Run, bytes: &[u8]| {
                assert!(run.range().map(|at| at as u8).eq(bytes.iter().copied()));
                got.entry(run.tensor.clone()).or_default().extend(run.range());
            };
            mine.iter().for_each(|part| note(part.run.clone(), &part.bytes));
            perform(world, &moves, &mine.iter().collect::<Vec<_>>(), note).unwrap();
            third.into_iter().all(|at| got["m"].contains(&at)) && got["w"].len() == 12
        });
        assert_eq!(filled, [true; 4]);
    }

    #[test]
    fn those_who_stay_take_over_what_the_others_hold_and_no_more() {
        let mut offers: Vec<Offer> = [0, 1, 3].map(|rank| Offer::new(&held(rank), Vec::new())).into();
        share_out(&mut offers, 8, 2);
        // Ranks 0 and 1 hold the quarters 3, 0 and 1; the lost rank's is at the one that goes.
        let wanted: Vec<Vec<Run>> = offers.iter().map(|offer| offer.wanted.clone()).collect();
        assert_eq!(wanted, [vec![run("m", 6..9)], vec![], vec![]]);
        let moves = plan(&offers, 8);
        assert_eq!(moves, [Move { from: 2, to: 0, run: run("m", 6..9) }]);
    }

    #[test]
    fn large_tensors_come_from_all_who_hold_them_in_rounds() {
        let large = |elements: usize| Run { tensor: "e".into(), start: 0, elements, whole: elements, size: 4 };
        let offers = [
            Offer { held: vec![(1, vec![large(50 << 20)])], wanted: Vec::new() },
            Offer { held: vec![(1, vec![large(50 << 20)])], wanted: Vec::new() },
            Offer { held: Vec::new(), wanted: vec![large(50 << 20)] },
        ];
        let moves = plan(&offers, 1);
        let sent = |rank: usize| -> usize {
            moves.iter().filter(|one| one.from == rank).map(|one| one.run.elements * one.run.size).sum()
        };
        assert_eq!((sent(0), sent(1)), (100 << 20, 100 << 20));
        let rounds = rounds(&moves);
        assert_eq!(rounds.len(), 4);
        assert_eq!(rounds.iter().map(|round| round.len()).sum::<usize>(), moves.len());
    }

    #[test]
    fn gaps_are_what_is_left() {
        let left = |ranges: &[(usize, usize)]| -> Vec<(usize, usize)> {
            let gaps = gaps(2..10, ranges.iter().map(|(start, end)| *start..*end));
            gaps.into_iter().map(|gap| (gap.start, gap.end)).collect()
        };
        assert_eq!(left(&[]), [(2, 10)]);
        assert_eq!(left(&[(0, 3), (2, 5), (8, 9)]), [(5, 8), (9, 10)]);
        assert!(left(&[(0, 20)]).is_empty());
        assert_eq!(left(&[(12, 20)]), [(2, 10)]);
    }
}
