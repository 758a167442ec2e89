//! Spatial parallelism: the ranks along two axes share the rows and columns of every image.
//!
//! Convolutions and pooling compute their own rows and columns; what their windows reach beyond them is a halo, which neighbours
//! exchange. Statistics and gradients of weights are sums over tiles, made tile by tile as all shared sums are. Layers have
//! whole weights. `tiles` says into how many parts images are cut. It belongs to the job like its grains, so that any number of
//! ranks that divides it gives the same bits, one among them.
//!
//! Rows are cut first, then columns, each by one rewrite ([`crate::partition`]): the halo of the columns has that of the rows
//! in it, corners and all.

use crate::mesh::Mesh;
use crate::partition::{Group, Planes, Rules, lower, plan};
use crate::strategy::{Facts, Key, KeyValue, Part, Purpose, Refusal, Strategy, StrategyKind};
use kolo_graph::settings::{SettingError, Settings};
use kolo_graph::sources::Input;
use kolo_graph::{DType, Graph, InputRole};
use kolo_ops::batch_norm_parts;
use std::sync::Arc;

/// The axes along which images are cut.
const AXES: [&str; 2] = ["height", "width"];
/// Dims of an image `[n, c, h, w]` that are cut.
const DIMS: [usize; 2] = [2, 3];
/// Tiles along a side, at most.
const TILES_MAX: usize = 64;

const RANKS: Key = Key {
    name: "spatial",
    value: KeyValue::Pair { most: TILES_MAX },
    doc: "workers that share the rows and columns of every image, with halos: `[2, 1]` are two strips, `[2, 2]` four tiles",
};
const TILES: Key = Key {
    name: "tiles",
    value: KeyValue::Pair { most: TILES_MAX },
    doc: "parts that images are cut into for `spatial`, powers of two and multiples of it; part of the job, as grains are",
};

pub const KIND: StrategyKind = StrategyKind {
    name: "spatial",
    doc: "spatial parallelism: workers share the rows and columns of every image",
    keys: &[RANKS, TILES],
    read: |settings| Ok(read(settings)?.map(|one| Arc::new(one) as Arc<dyn Strategy>)),
};

fn read(settings: &Settings) -> Result<Option<Spatial>, SettingError> {
    let (ranks, tiles) = (RANKS.pair(settings)?, TILES.pair(settings)?);
    if let Some(odd) = tiles.iter().find(|count| !count.is_power_of_two()) {
        let message = format!("is {tiles:?}, and {odd} is no power of two");
        let hint = format!("write {} or {} instead", odd.next_power_of_two() / 2, odd.next_power_of_two());
        return Err(settings.wrong(TILES.name, message, hint));
    }
    Ok((ranks != [1, 1] || tiles != [1, 1]).then_some(Spatial { ranks, tiles }))
}

/// Spatial parallelism with its settings.
#[derive(Clone, Copy, Debug)]
pub struct Spatial {
    /// Workers along rows and columns.
    pub ranks: [usize; 2],
    pub tiles: [usize; 2],
}

impl Spatial {
    /// Slices along a side for so many ranks: those of the job, or if it does not promise its bits one each.
    fn slices(&self, side: usize, ranks: usize) -> usize {
        if self.tiles[side].is_multiple_of(ranks) { self.tiles[side] } else { ranks }
    }

    /// Refuses a model without images, and images that are too small.
    fn check_images(&self, graph: &Graph, mesh: &Mesh) -> Result<(), Refusal> {
        let Some(image) = image_of(graph) else {
            let message = "cuts images, and the model has none";
            let hint = "use it for a model of images, such as `resnet18`, and `tensor` or `pipeline` for this one";
            return Err(Refusal::of_key(&RANKS, message, hint));
        };
        let sides = [image.shape[2], image.shape[3]];
        let wanted: [usize; 2] = std::array::from_fn(|side| self.slices(side, mesh.size(AXES[side])));
        if sides.iter().zip(wanted).any(|(size, slices)| *size < slices) {
            let most = sides.map(|size| if size.is_power_of_two() { size } else { size.next_power_of_two() / 2 });
            let message = format!("is {wanted:?}, but images are {} × {} pixels", sides[0], sides[1]);
            return Err(Refusal::of_key(&TILES, message, format!("write `{} = {most:?}` or less", TILES.name)));
        }
        Ok(())
    }
}

/// The first input that is an image.
fn image_of(graph: &Graph) -> Option<&Input> {
    let is_image = |op: &Input| op.role == InputRole::Data && op.dtype == DType::F32 && op.shape.len() == 4;
    graph.inputs().map(|(_, op)| op).find(|op| is_image(op))
}

impl Strategy for Spatial {
    fn name(&self) -> &'static str {
        KIND.name
    }
    fn part(&self) -> Part {
        Part::Model
    }
    fn written(&self) -> String {
        match self.ranks {
            [1, 1] => format!("parallel.{} = {:?}", TILES.name, self.tiles),
            ranks => format!("parallel.{} = {ranks:?}", RANKS.name),
        }
    }
    fn axes(&self) -> Vec<(&'static str, usize)> {
        AXES.into_iter().zip(self.ranks).collect()
    }
    fn check(&self, job: Facts, _: &[&dyn Strategy]) -> Result<(), Refusal> {
        let uneven = self.tiles.iter().zip(self.ranks).any(|(tiles, ranks)| !tiles.is_multiple_of(ranks));
        if job.reproducible && uneven {
            let least: [usize; 2] =
                std::array::from_fn(|side| self.tiles[side].max(self.ranks[side].next_power_of_two()));
            let hint = match self.ranks.iter().all(|ranks| ranks.is_power_of_two()) {
                true => format!("write `{} = {least:?}` beside it, or `job.reproducible = false`", TILES.name),
                false => format!(
                    "use {:?} or {:?} with as many `{}`, or write `job.reproducible = false`",
                    self.ranks.map(|ranks| (ranks / 2 + 1).next_power_of_two()),
                    self.ranks.map(usize::next_power_of_two),
                    TILES.name
                ),
            };
            let message = format!(
                "is {:?}, but images have {:?} tiles: workers that share an image need a tile each, so that the order of sums \
                 is that of the job",
                self.ranks, self.tiles
            );
            return Err(Refusal::of_key(&RANKS, message, hint));
        }
        Ok(())
    }
    fn split(&self, graph: Graph, training: &Graph, _: Purpose, mesh: &Mesh) -> Result<Graph, Refusal> {
        self.check_images(training, mesh)?;
        let mut graph = batch_norm_parts::in_steps(&graph, |_| true);
        for (side, axis) in AXES.into_iter().enumerate() {
            let (ranks, rank) = (mesh.size(axis), mesh.coordinate(axis));
            let slices = self.slices(side, ranks);
            if slices == 1 {
                continue;
            }
            let whole = graph.params().map(|(_, op)| op.name.clone()).collect();
            let planes = Some(Planes { dim: DIMS[side], whole: Vec::new() });
            let plan = plan(&graph, slices, &Rules { whole, planes, ..Rules::default() });
            graph = lower(&graph, &plan, &Group { axis: axis.into(), ranks, rank });
        }
        Ok(graph)
    }
    fn layout(&self) -> Vec<(&'static str, usize)> {
        vec![("tiles", self.tiles.iter().product())]
    }
}
