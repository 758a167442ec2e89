//! Pipeline parallelism: the layers of the model lie on ranks one behind the other, and the grains pass through them.

use super::families::{FAMILIES, Sizes, family};
use super::lower::{BACKWARD, FORWARD, PIPELINE, Ranks, WEIGHTS, lower, segment};
use super::schedule::{ActionKind, Schedule};
use super::stages::Stages;
use super::{text, verify};
use crate::mesh::Mesh;
use crate::strategy::{Key, KeyValue, Part, Purpose, Refusal, Strategy, StrategyKind};
use kolo_exec::Order;
use kolo_graph::Graph;
use kolo_graph::settings::{SettingError, Settings};
use std::sync::Arc;

const RANKS: Key = Key {
    name: PIPELINE,
    value: KeyValue::Count { default: 1, least: 1, most: super::schedule::RANKS_MAX },
    doc: "workers that have the layers of the model one behind the other; grains pass through them",
};
const CHUNKS: Key = Key {
    name: "chunks",
    value: KeyValue::Count { default: 1, least: 1, most: 64 },
    doc: "stages of the pipeline on each of its workers; more than one with `schedule = \"interleaved\"`",
};
const SCHEDULE: Key = Key {
    name: "schedule",
    value: KeyValue::Text { default: "1f1b" },
    doc: "`gpipe`, `1f1b`, `interleaved`, `zero-bubble`, or a file that holds a schedule (docs/schedules.md)",
};
const STAGES: Key = Key {
    name: "stages",
    value: KeyValue::Names,
    doc: "layers at which the stages of the pipeline begin, but for the first; by cost if there are none",
};

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
            let content = std::fs::read(&schedule).map_err(|error| {
                settings.wrong(
                    SCHEDULE.name,
                    format!("is \"{schedule}\", which is no file that can be read: {error}"),
                    hint,
                )
            })?;
            let parsed = text::parse_bytes(&content).map_err(|error| {
                settings.wrong(
                    SCHEDULE.name,
                    format!("is \"{schedule}\", and {error}"),
                    "mend the file; docs/schedules.md has examples",
                )
            })?;
            Recipe::File(Arc::new(parsed))
        }
    };
    Ok(Some(Pipeline { ranks, chunks, recipe, names }))
}

#[derive(Clone, Debug)]
enum Recipe {
    /// By the name of its family.
    Family(String),
    File(Arc<Schedule>),
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
    pub fn schedule_of(&self, grains: usize) -> Result<Schedule, Refusal> {
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
        if schedule.placement.up.is_some() {
            let message = "has two directions, which cannot be run yet";
            return Err(Refusal::of_key(&SCHEDULE, message, "use `1f1b`, `interleaved` or `zero-bubble`"));
        }
        Ok(schedule)
    }

    fn splits_backward(schedule: &Schedule) -> Result<bool, Refusal> {
        let has = |kind: ActionKind| schedule.actions.iter().flatten().any(|action| action.kind == kind);
        match (has(ActionKind::Backward), has(ActionKind::BackwardInput)) {
            (true, true) => {
                let message = "has both whole and split backward passes";
                Err(Refusal::of_key(&SCHEDULE, message, "split all of them into I and W, or none"))
            }
            (_, split) => Ok(split),
        }
    }

    /// What a rank does in a step of so many grains.
    fn order_of(&self, rank: usize, grains: usize) -> Result<Order, Refusal> {
        let schedule = self.schedule_of(grains)?;
        let verified = verify(&schedule).map_err(|error| refusal(&error))?;
        let split = Self::splits_backward(&schedule)?;
        if split && schedule.stages > schedule.ranks {
            let message = "splits the backward pass of several stages per rank, which cannot be run";
            return Err(Refusal::of_key(&SCHEDULE, message, "split it with one stage per rank"));
        }
        for (rank, stage) in
            (0..schedule.ranks).flat_map(|rank| schedule.stages_of(rank).into_iter().map(move |s| (rank, s)))
        {
            if !verified.gradients(rank, stage).is_sorted() {
                let message = format!(
                    "adds the gradients of stage {stage} on rank {rank} in another order than that of the grains"
                );
                return Err(Refusal::of_key(
                    &SCHEDULE,
                    message,
                    "let the backward passes of a stage come in the order of micro-batches",
                ));
            }
        }
        let of_stage = &schedule.placement.down;
        let chunk = |stage: usize| of_stage[..stage].iter().filter(|rank| **rank == of_stage[stage]).count();
        let kind = |kind: ActionKind| match kind {
            ActionKind::Forward => FORWARD,
            ActionKind::Backward | ActionKind::BackwardInput => BACKWARD,
            ActionKind::BackwardWeight => WEIGHTS,
        };
        let actions = schedule.actions[rank].iter();
        let actions =
            actions.map(|action| (segment(chunk(action.stage), kind(action.kind)), action.micro_batch)).collect();
        Ok(Order { slots: slots(&schedule), actions })
    }
}

/// How many sets of activations are enough if grain `g` takes set `g % slots`, on any rank.
fn slots(schedule: &Schedule) -> usize {
    let fits = |slots: &usize| {
        schedule.actions.iter().all(|actions| {
            let mut left = vec![0usize; schedule.micro_batches];
            actions.iter().for_each(|action| left[action.micro_batch] += 1);
            let mut holder: Vec<Option<usize>> = vec![None; *slots];
            actions.iter().all(|action| {
                let slot = &mut holder[action.micro_batch % slots];
                let free = slot.is_none_or(|grain| grain == action.micro_batch);
                left[action.micro_batch] -= 1;
                *slot = (left[action.micro_batch] > 0).then_some(action.micro_batch);
                free
            })
        })
    };
    (1..=schedule.micro_batches).find(fits).unwrap_or(schedule.micro_batches)
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
    fn axis(&self) -> Option<(&'static str, usize)> {
        Some((PIPELINE, self.ranks))
    }
    fn split(&self, graph: Graph, training: &Graph, purpose: Purpose, mesh: &Mesh) -> Result<Graph, Refusal> {
        let ranks = mesh.size(PIPELINE);
        if ranks == 1 {
            return Ok(graph);
        }
        let (of_stage, split_backward) = match (&self.recipe, purpose) {
            (Recipe::File(schedule), _) => (schedule.placement.down.clone(), Self::splits_backward(schedule)?),
            (Recipe::Family(name), _) => {
                ((0..ranks * self.chunks).map(|stage| stage % ranks).collect::<Vec<_>>(), name == "zero-bubble")
            }
        };
        let stages = Stages::cut(training, of_stage.len(), &self.names)?;
        Ok(lower(&graph, &stages, &Ranks { of_stage, ranks, rank: mesh.coordinate(PIPELINE), split_backward }))
    }
    fn schedule(&self, mesh: &Mesh, grains: usize) -> Result<Option<Schedule>, Refusal> {
        match mesh.size(PIPELINE) {
            1 => Ok(None),
            _ => self.schedule_of(grains).map(Some),
        }
    }
    fn order(&self, mesh: &Mesh, grains: usize) -> Result<Option<Order>, Refusal> {
        match mesh.size(PIPELINE) {
            1 => Ok(None),
            _ => self.order_of(mesh.coordinate(PIPELINE), grains).map(Some),
        }
    }
    fn layout(&self) -> Vec<(&'static str, usize)> {
        vec![("chunks", self.chunks)]
    }
}
