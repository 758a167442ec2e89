//! What each layer computes again, so that a step takes the least time in the memory that there is: by dynamic programming.
//!
//! A rank of the pipeline goes through the units of its stages. Of what it has chosen so far, three numbers matter for the rest:
//! what the units keep, the most that a backward pass takes on top of that, and the seconds. A choice is left out only if another
//! one has the same need on top, keeps no more and takes no longer, so what is found is the least. Numbers are whole bytes and
//! picoseconds: choices that differ in their order alone come to the same.

use super::{Composition, UnitTimes};
use crate::cluster::Cluster;
use crate::counted::Counted;
use crate::mixed::KINDS;
use crate::schedule_cache::ScheduleCache;
use crate::step_model::ParallelLayout;
use kolo_parallel::Recompute;
use std::collections::BTreeMap;

const PICOSECONDS: f64 = 1e12;

/// A unit that computes this much again.
#[derive(Clone, Copy, Debug, PartialEq)]
struct UnitChoice {
    what: Recompute,
    /// Bytes.
    saved: i64,
    transient: i64,
    picoseconds: i64,
}

/// The choices of a unit of a rank.
#[derive(Clone, Debug, PartialEq)]
struct UnitChoices {
    /// The layer, if it is one.
    layer: Option<usize>,
    /// Whether a stage of the rank begins here.
    begins_stage: bool,
    choices: Vec<UnitChoice>,
}

/// What a rank may hold of activations.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Budget {
    bytes: f64,
    /// How many times what its units save is there at once.
    copies: f64,
}

/// Needs on top of what is kept: of stages before, and of the one that is being chosen for.
type Tops = (i64, i64);

/// What was chosen for the units so far.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Chosen {
    saved: i64,
    picoseconds: i64,
    /// The choice before the last, and the last, in [`History`].
    history: usize,
}

/// Choices, each with the number of the one before it.
#[derive(Default)]
struct History(Vec<(usize, Recompute)>);

/// What each layer computes again so that every rank takes at most `memory` bytes and the step the least time. `all` are the
/// steps in which all layers compute the same again, by [`Recompute`]. `None` if nothing fits.
pub fn fit_layers(
    all: [&Counted; KINDS],
    layout: &ParallelLayout,
    cluster: &Cluster,
    schedules: &ScheduleCache,
    memory: f64,
) -> Option<Vec<Recompute>> {
    let layers = all[0].anatomy.layers.len();
    if layers == 0 || all.iter().any(|one| one.anatomy.order.len() != layers + 2) {
        return None;
    }
    let stages = all[0].stages(layout, cluster).ok()?;
    let mut compositions = Vec::new();
    for one in all {
        let composition = Composition::new(&one.anatomy, layout, cluster, stages.clone()).ok()?;
        let costs = one.costs(layout, cluster);
        let times: Vec<UnitTimes> = one
            .anatomy
            .units
            .iter()
            .zip(&costs.by_unit)
            .map(|(unit, times)| composition.unit_times(unit, times))
            .collect();
        compositions.push(Composition { times, ..composition });
    }
    let in_flight = compositions[0].in_flight(schedules).ok()?;
    let mut what = vec![Recompute::None; layers];
    for (place, in_flight) in in_flight.iter().enumerate() {
        let own = compositions[0].stages_of(place);
        let fixed = compositions[0].without_activations(&own);
        let budget = Budget { bytes: memory - fixed, copies: in_flight / own.len() as f64 };
        let places = places(&compositions, &own, layers);
        let choices = least(&places, budget)?;
        let chosen = places.iter().zip(choices).filter_map(|(place, choice)| Some((place.layer?, choice)));
        chosen.for_each(|(layer, choice)| what[layer] = choice);
    }
    Some(what)
}

/// The units of a rank's stages with their choices: only layers have more than one.
fn places(compositions: &[Composition<'_>], own: &[usize], layers: usize) -> Vec<UnitChoices> {
    let shares_layers = compositions[0].layout.shares_layers();
    let mut places = Vec::new();
    for stage in own {
        for (nth, at) in compositions[0].stages[*stage].clone().enumerate() {
            let layer = at.checked_sub(1).filter(|layer| *layer < layers);
            let kinds = if layer.is_some() { Recompute::that_differ(shares_layers) } else { &[Recompute::None] };
            let choices = kinds.iter().map(|what| compositions[*what as usize].choice(at, *what)).collect();
            places.push(UnitChoices { layer, begins_stage: nth == 0, choices });
        }
    }
    places
}

impl Composition<'_> {
    fn choice(&self, at: usize, what: Recompute) -> UnitChoice {
        let number = self.anatomy.order[at];
        let unit = &self.anatomy.units[number];
        UnitChoice {
            what,
            saved: self.saved(unit).ceil() as i64,
            transient: self.on_top(unit).ceil() as i64,
            picoseconds: (self.times[number].seconds() * PICOSECONDS).round() as i64,
        }
    }
}

/// The choices that take the least time in a budget, one for each place.
fn least(places: &[UnitChoices], budget: Budget) -> Option<Vec<Recompute>> {
    let mut history = History::default();
    let start = Chosen { saved: 0, picoseconds: 0, history: usize::MAX };
    let mut known: BTreeMap<Tops, Vec<Chosen>> = BTreeMap::from([((0, 0), vec![start])]);
    for place in places {
        let mut next: BTreeMap<Tops, Vec<Chosen>> = BTreeMap::new();
        for ((before, current), list) in &known {
            let (before, current) = if place.begins_stage { (*before.max(current), 0) } else { (*before, *current) };
            for choice in &place.choices {
                // Units behind it have given up theirs.
                let tops = (before, (current - choice.saved).max(choice.transient));
                let entry = next.entry(tops).or_default();
                entry.extend(list.iter().filter(|one| budget.holds(one.saved + choice.saved, 0)).map(|one| Chosen {
                    saved: one.saved + choice.saved,
                    picoseconds: one.picoseconds + choice.picoseconds,
                    history: history.push(one.history, choice.what),
                }));
            }
        }
        next.values_mut().for_each(keep_the_best);
        known = next;
    }
    let fits = known.iter().flat_map(|((before, current), list)| {
        list.iter().filter(move |one| budget.holds(one.saved, *before.max(current)))
    });
    let best = fits.min_by_key(|one| (one.picoseconds, one.saved))?;
    Some(history.of(best.history, places.len()))
}

impl Budget {
    fn holds(&self, saved: i64, on_top: i64) -> bool {
        saved as f64 * self.copies + on_top as f64 <= self.bytes
    }
}

/// Leaves out whoever keeps no less and takes no less time than another.
fn keep_the_best(list: &mut Vec<Chosen>) {
    list.sort_by_key(|one| (one.saved, one.picoseconds));
    let mut fastest = i64::MAX;
    list.retain(|one| {
        let is_faster = one.picoseconds < fastest;
        fastest = fastest.min(one.picoseconds);
        is_faster
    });
}

impl History {
    fn push(&mut self, before: usize, what: Recompute) -> usize {
        self.0.push((before, what));
        self.0.len() - 1
    }

    /// The last `count` choices, in their order.
    fn of(&self, last: usize, count: usize) -> Vec<Recompute> {
        let mut at = last;
        let mut all: Vec<Recompute> = (0..count)
            .map_while(|_| {
                let (before, what) = *self.0.get(at)?;
                at = before;
                Some(what)
            })
            .collect();
        all.reverse();
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that a seed draws.
    fn draw(seed: &mut u64, most: u64) -> i64 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((*seed >> 33) % most) as i64
    }

    /// Layers whose choices cost what the seed draws, on stages of at most four.
    fn drawn(seed: &mut u64, layers: usize) -> Vec<UnitChoices> {
        let place = |layer: usize, seed: &mut u64| {
            let mut choice = |what, saved, transient, seconds| UnitChoice {
                what,
                saved: draw(seed, saved),
                transient: draw(seed, transient),
                picoseconds: draw(seed, seconds),
            };
            let choices = vec![
                choice(Recompute::None, 40, 20, 10),
                choice(Recompute::Selective, 25, 30, 20),
                choice(Recompute::Blocks, 10, 60, 40),
            ];
            UnitChoices { layer: Some(layer), begins_stage: layer.is_multiple_of(4), choices }
        };
        (0..layers).map(|layer| place(layer, seed)).collect()
    }

    /// The time and the memory of a choice, by the definition of memory.rs.
    fn cost(places: &[UnitChoices], choices: &[usize], budget: Budget) -> (i64, f64) {
        let chosen: Vec<UnitChoice> = places.iter().zip(choices).map(|(place, at)| place.choices[*at]).collect();
        let (mut top, mut begin) = (0, 0);
        for end in 1..=places.len() {
            if end < places.len() && !places[end].begins_stage {
                continue;
            }
            let all: i64 = chosen[begin..end].iter().map(|one| one.saved).sum();
            let mut kept = 0;
            for one in &chosen[begin..end] {
                kept += one.saved;
                top = top.max(kept - all + one.transient);
            }
            begin = end;
        }
        let saved: i64 = chosen.iter().map(|one| one.saved).sum();
        (chosen.iter().map(|one| one.picoseconds).sum(), saved as f64 * budget.copies + top as f64)
    }

    #[test]
    fn the_least_is_what_trying_every_choice_finds() {
        let mut seed = 7;
        let mut refused = 0;
        for round in 0..60 {
            let layers = 1 + round % 7;
            let places = drawn(&mut seed, layers);
            let copies = [0.5, 1.0, 2.5][round % 3];
            let budget = Budget { bytes: draw(&mut seed, 30 * layers as u64 + 20) as f64, copies };
            let all = (0..3usize.pow(layers as u32)).map(|number| {
                let choices: Vec<usize> = (0..layers).map(|at| number / 3usize.pow(at as u32) % 3).collect();
                cost(&places, &choices, budget)
            });
            let wanted = all.filter(|(_, bytes)| *bytes <= budget.bytes).map(|(seconds, _)| seconds).min();
            let found = least(&places, budget).map(|what| {
                let choices: Vec<usize> = what.iter().map(|what| *what as usize).collect();
                let (seconds, bytes) = cost(&places, &choices, budget);
                assert!(bytes <= budget.bytes, "round {round}");
                seconds
            });
            assert_eq!(found, wanted, "round {round}");
            refused += usize::from(wanted.is_none());
        }
        assert!((5..50).contains(&refused), "{refused} of 60 rounds have no choice that fits");
    }
}
