//! Pipeline parallelism: the layers of the model lie on ranks one behind the other, and the grains pass through them.

use super::directions::halves;
use super::families::{FAMILIES, Sizes, USUAL, family};
use super::lower::{BACKWARD, FORWARD, PIPELINE, Ranks, WEIGHTS, lower};
use super::program::{RankProgram, prove};
use super::schedule::{Action, ActionKind, Direction, PipelineSchedule, StagePlacement};
use super::slots::Slots;
use super::stages::Stages;
use super::{Verified, text, verify};
use crate::mesh::Mesh;
use crate::strategy::{Facts, Key, KeyValue, Part, Purpose, Refusal, Strategy, StrategyKind, TrainingGraphs};
use kolo_exec::{Order, Turn};
use kolo_graph::Graph;
use kolo_graph::graph::Phase;
use kolo_graph::settings::{SettingError, Settings};
use kolo_graph::sources::State;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;

pub const RANKS: Key = Key {
    name: PIPELINE,
    value: KeyValue::Count { default: 1, least: 1, most: super::schedule::RANKS_MAX },
    of_job: false,
    doc: "workers that have the layers of the model one behind the other; grains pass through them",
};
pub const CHUNKS: Key = Key {
    name: "chunks",
    value: KeyValue::Count { default: 1, least: 1, most: 64 },
    of_job: false,
    doc: "stages of the pipeline on each of its workers; more than one with `schedule = \"interleaved\"`",
};
pub const SCHEDULE: Key = Key {
    name: "schedule",
    value: KeyValue::Text { default: USUAL.name },
    of_job: false,
    doc: "`gpipe`, `1f1b`, `interleaved`, `zero-bubble`, `bidirectional`, or a file that holds a schedule (docs/schedules.md)",
};
pub const STAGES: Key = Key {
    name: "stages",
    value: KeyValue::Names,
    of_job: false,
    doc: "layers at which the stages of the pipeline begin, but for the first; by cost if there are none",
};

/// The family whose grains go in two directions.
const BIDIRECTIONAL: &str = "bidirectional";

pub const KIND: StrategyKind = StrategyKind {
    name: "pipeline",
    doc: "pipeline parallelism: workers have the layers one behind the other",
    keys: &[RANKS, CHUNKS, SCHEDULE, STAGES],
    read: |settings| Ok(read(settings)?.map(|one| Arc::new(one) as Arc<dyn Strategy>)),
};

fn read(settings: &Settings) -> Result<Option<Pipeline>, SettingError> {
    let (ranks, chunks) = (RANKS.count_within(settings)?, CHUNKS.count_within(settings)?);
    let (schedule, names) = (SCHEDULE.text(settings)?, STAGES.names(settings)?);
    if ranks == 1 {
        return Ok(None);
    }
    let recipe = match FAMILIES.iter().any(|family| family.name == schedule) {
        true => Recipe::Family(schedule),
        false => {
            let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
            let hint = format!("write one of {}, or name a file that holds a schedule", names.join(", "));
            let content = read_file(&schedule).map_err(|error| {
                settings.wrong(SCHEDULE.name, format!("is \"{schedule}\", which cannot be read: {error}"), hint)
            })?;
            let parsed = text::parse_bytes(&content).map_err(|error| {
                settings.wrong(
                    SCHEDULE.name,
                    format!("is \"{schedule}\", and {error}"),
                    "fix the file; docs/schedules.md has examples",
                )
            })?;
            Recipe::File(Arc::new(parsed))
        }
    };
    Ok(Some(Pipeline { ranks, chunks, recipe, names }))
}

/// What a regular file holds, up to what is too much for a schedule: a pipe would be waited for, and a device may never end.
fn read_file(path: &str) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    kolo_base::open_regular(path.as_ref())?.take(text::TEXT_BYTES_MAX as u64 + 1).read_to_end(&mut content)?;
    Ok(content)
}

#[derive(Clone, Debug)]
enum Recipe {
    /// By the name of its family.
    Family(String),
    File(Arc<PipelineSchedule>),
}

/// Pipeline parallelism with its settings.
#[derive(Clone, Debug)]
pub struct Pipeline {
    ranks: usize,
    chunks: usize,
    recipe: Recipe,
    names: Vec<String>,
}

fn refusal(error: &super::ScheduleError) -> Refusal {
    let text = error.to_string();
    let message = text.split("\n  hint: ").next().unwrap_or(&text);
    Refusal::of_key(&SCHEDULE, format!("does not fit: {message}"), error.hint())
}

impl Pipeline {
    /// The schedule for so many grains of a data rank.
    pub fn schedule_of(&self, grains: usize) -> Result<PipelineSchedule, Refusal> {
        let schedule = match &self.recipe {
            Recipe::Family(name) => {
                let sizes = Sizes { ranks: self.ranks, micro_batches: grains, chunks: self.chunks };
                family(name).and_then(|family| family.schedule(sizes)).map_err(|error| refusal(&error))?
            }
            Recipe::File(schedule) => (**schedule).clone(),
        };
        if (schedule.ranks, schedule.micro_batches) != (self.ranks, grains) {
            let message = format!(
                "is for {} ranks and {} micro-batches, but there are {} and {grains} (the grains of each data rank)",
                schedule.ranks, schedule.micro_batches, self.ranks
            );
            return Err(Refusal::of_key(
                &SCHEDULE,
                message,
                "change the file, `pipeline`, `data.grains` or the workers",
            ));
        }
        if schedule.placement.up.is_some() && halves(&schedule).is_none() {
            let message = "does not send one half of the micro-batches down and the other half up";
            let hint = "send the first half, in a row, one way and the second half the other; otherwise sums differ from \
                        those of one worker";
            return Err(Refusal::of_key(&SCHEDULE, message, hint));
        }
        Ok(schedule)
    }

    fn splits_backward(schedule: &PipelineSchedule) -> Result<bool, Refusal> {
        let has = |kind: ActionKind| schedule.actions.iter().flatten().any(|action| action.kind == kind);
        match (has(ActionKind::Backward), has(ActionKind::BackwardInput)) {
            (true, true) => {
                let message = "has both whole and split backward passes";
                Err(Refusal::of_key(&SCHEDULE, message, "split all of them into I and W, or none"))
            }
            (_, split) => Ok(split),
        }
    }

    /// What these ranks do in a step of so many grains.
    fn orders_of(&self, ranks: Range<usize>, grains: usize) -> Result<Vec<Order>, Refusal> {
        let schedule = self.schedule_of(grains)?;
        let verified = verify(&schedule).map_err(|error| refusal(&error))?;
        let split = Self::splits_backward(&schedule)?;
        if split && schedule.stages > schedule.ranks {
            let message = "splits the backward pass of several stages per rank, which cannot be run";
            return Err(Refusal::of_key(&SCHEDULE, message, "split it with one stage per rank"));
        }
        check_order_of_sums(&schedule, &verified)?;
        let slots = Slots::find(&schedule);
        Ok(ranks.map(|rank| order(&schedule, &slots, rank, split)).collect())
    }

    /// Where stages lie, in each direction, and whether backward passes are split.
    fn placement(&self, ranks: usize) -> Result<(Vec<Vec<usize>>, bool), Refusal> {
        let (placement, split) = match &self.recipe {
            Recipe::File(schedule) => (schedule.placement.clone(), Self::splits_backward(schedule)?),
            Recipe::Family(name) if name == BIDIRECTIONAL => (StagePlacement::bidirectional(ranks, 2), false),
            Recipe::Family(name) => (StagePlacement::round_robin(ranks, ranks * self.chunks, 1), name == "zero-bubble"),
        };
        Ok(([placement.down].into_iter().chain(placement.up).collect(), split))
    }
}

/// Refuses a schedule in which a rank adds the gradients of a stage in another order than that of the grains.
fn check_order_of_sums(schedule: &PipelineSchedule, verified: &Verified) -> Result<(), Refusal> {
    let stages = |rank: usize| schedule.stages_of(rank).into_iter().map(move |stage| (rank, stage));
    for (rank, stage) in (0..schedule.ranks).flat_map(stages) {
        let added = verified.gradients(rank, stage);
        for direction in [Direction::Down, Direction::Up] {
            let own = added.iter().filter(|grain| schedule.placement.directions[**grain] == direction);
            if !own.is_sorted() {
                let message = format!(
                    "adds the gradients of stage {stage} on rank {rank} in another order than that of the grains"
                );
                let hint = "let the backward passes of a stage come in the order of micro-batches";
                return Err(Refusal::of_key(&SCHEDULE, message, hint));
            }
        }
    }
    Ok(())
}

/// What a rank does in a step by a schedule that is proven.
fn order(schedule: &PipelineSchedule, slots: &Slots, rank: usize, split_backward: bool) -> Order {
    let placement = &schedule.placement;
    let of_stage = [placement.down.clone()].into_iter().chain(placement.up.clone()).collect();
    let ranks = Ranks { of_stage, ranks: schedule.ranks, rank, split_backward };
    let kind = |kind: ActionKind| match kind {
        ActionKind::Forward => FORWARD,
        ActionKind::Backward | ActionKind::BackwardInput => BACKWARD,
        ActionKind::BackwardWeight => WEIGHTS,
    };
    let starts = halves(schedule).filter(|_| placement.up.is_some()).unwrap_or([0, 0]);
    let turn = |action: &Action| {
        let (grain, direction) = (action.micro_batch, placement.directions[action.micro_batch] as usize);
        let segment = ranks.segment(ranks.chunk(direction, action.stage), kind(action.kind));
        Turn { segment, grain, slot: slots.of_grain[grain], term: grain - starts[direction] }
    };
    let ways = ranks.of_stage.len();
    Order { slots: slots.count, ways, turns: schedule.actions[rank].iter().map(turn).collect() }
}

impl Strategy for Pipeline {
    fn name(&self) -> &'static str {
        KIND.name
    }
    fn part(&self) -> Part {
        Part::Model
    }
    fn written(&self) -> String {
        format!("parallel.{} = {}", RANKS.name, self.ranks)
    }
    fn axes(&self) -> Vec<(&'static str, usize)> {
        vec![(PIPELINE, self.ranks)]
    }
    fn cuts_between_layers(&self) -> bool {
        true
    }
    /// The factor of scaled gradients is a state that all stages read and one updates.
    fn check(&self, job: Facts, _: &[&dyn Strategy]) -> Result<(), Refusal> {
        match job.scales_gradients {
            true => {
                let message = format!("is {}, which cannot be combined with `train.precision = \"f16\"`", self.ranks);
                Err(Refusal::of_key(&RANKS, message, "write `precision = \"bf16\"`, which needs no scale"))
            }
            false => Ok(()),
        }
    }
    fn split(
        &self,
        graph: Graph,
        training: TrainingGraphs<'_>,
        purpose: Purpose,
        mesh: &Mesh,
    ) -> Result<Graph, Refusal> {
        let ranks = mesh.size(PIPELINE);
        if ranks == 1 {
            return Ok(graph);
        }
        let (mut of_stage, split_backward) = self.placement(ranks)?;
        let stages = Stages::cut(training.whole, of_stage[0].len(), &self.names)?;
        match purpose {
            Purpose::Training => check_states(&graph, of_stage.len())?,
            // Nothing comes back: one direction does.
            Purpose::Evaluation { .. } | Purpose::Server => of_stage.truncate(1),
        }
        Ok(lower(&graph, &stages, &Ranks { of_stage, ranks, rank: mesh.coordinate(PIPELINE), split_backward }))
    }
    fn prove(&self, graph: &Graph, training: &Graph, mesh: &Mesh, grains: usize) -> Result<(), Refusal> {
        let ranks = mesh.size(PIPELINE);
        if ranks == 1 {
            return Ok(());
        }
        let orders = self.orders_of(0..ranks, grains)?;
        let (of_stage, split_backward) = self.placement(ranks)?;
        let stages = Stages::cut(training, of_stage[0].len(), &self.names)?;
        let places = |rank: usize| Ranks { of_stage: of_stage.clone(), ranks, rank, split_backward };
        let programs: Vec<RankProgram> =
            (0..ranks).map(|rank| RankProgram::of(&lower(graph, &stages, &places(rank)))).collect();
        prove(&programs, &orders).map_err(|fault| {
            let hint = "use `1f1b`, or a schedule file in which every rank can go on";
            Refusal::of_key(&SCHEDULE, format!("cannot run this model: {fault}"), hint)
        })
    }
    fn schedule(&self, mesh: &Mesh, grains: usize) -> Result<Option<PipelineSchedule>, Refusal> {
        match mesh.size(PIPELINE) {
            1 => Ok(None),
            _ => self.schedule_of(grains).map(Some),
        }
    }
    fn order(&self, mesh: &Mesh, grains: usize) -> Result<Option<Order>, Refusal> {
        match mesh.size(PIPELINE) {
            1 => Ok(None),
            _ => {
                let rank = mesh.coordinate(PIPELINE);
                Ok(self.orders_of(rank..rank + 1, grains)?.pop())
            }
        }
    }
    fn goes_both_ways(&self) -> bool {
        match &self.recipe {
            Recipe::Family(name) => name == BIDIRECTIONAL,
            Recipe::File(schedule) => schedule.placement.up.is_some(),
        }
    }
    fn layout(&self) -> Vec<(&'static str, usize)> {
        vec![("chunks", self.chunks)]
    }
}

/// Refuses two directions for a model whose grains read a state: it changes on one of the two ranks of a stage only. What is made
/// of a state for the update alone (the mean over steps of a batch norm) is the affair of the rank that keeps it.
fn check_states(graph: &Graph, directions: usize) -> Result<(), Refusal> {
    let phases = graph.phases();
    let mut follows = vec![false; graph.nodes.len()];
    for (at, node) in graph.nodes.iter().enumerate().filter(|(at, _)| directions > 1 && phases[*at] != Phase::After) {
        follows[at] = node.op.is::<State>() || node.inputs.iter().any(|id| follows[graph.value(*id).node.0 as usize]);
        if follows[at] && phases[at] == Phase::Grain {
            let message = format!("has two directions, but `{}` reads a state of training", node.op.signature());
            return Err(Refusal::of_key(&SCHEDULE, message, "use `1f1b`, `interleaved` or `zero-bubble`"));
        }
    }
    Ok(())
}
