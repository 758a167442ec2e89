//! Spatial parallelism: the ranks along two axes share the rows and columns of every image.
//!
//! Convolutions and pooling compute their own rows and columns; what their windows reach beyond them is a halo, which neighbours
//! exchange. Statistics and gradients of weights are sums over tiles, made tile by tile as all shared sums are. Layers have
//! whole weights. `tiles` says into how many parts images are cut. It belongs to the job like its grains, so that any number of
//! ranks that divides it gives the same bits, one among them.
//!
//! Rows are cut first, then columns, each by one rewrite ([`crate::partition`]): the halo of the columns has that of the rows
//! in it, corners and all.

use crate::layers::{LAYERS, Layers, Way, layer_of, layers_of};
use crate::mesh::Mesh;
use crate::partition::{Choice, Group, PartitionPlan, Planes, Rules, lower, plan};
use crate::strategy::{Facts, Key, KeyValue, Part, Purpose, Refusal, Strategy, StrategyKind, TrainingGraphs};
use crate::tensor::TENSOR;
use kolo_graph::settings::{SettingError, Settings};
use kolo_graph::sources::Input;
use kolo_graph::{DType, Graph, InputRole};
use kolo_ops::batch_norm_parts;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The axes along which images are cut.
pub const HEIGHT: &str = "height";
pub const WIDTH: &str = "width";
const AXES: [&str; 2] = [HEIGHT, WIDTH];
/// Dims of an image `[n, c, h, w]` that are cut.
const DIMS: [usize; 2] = [2, 3];
/// Tiles along a side, at most.
const TILES_MAX: usize = 64;

pub const RANKS: Key = Key {
    name: "spatial",
    value: KeyValue::Pair { most: TILES_MAX },
    of_job: false,
    doc: "workers that share the rows and columns of every image, with halos: `[2, 1]` are two strips, `[2, 2]` four tiles",
};
pub const TILES: Key = Key {
    name: "tiles",
    value: KeyValue::Pair { most: TILES_MAX },
    of_job: true,
    doc: "parts that images are cut into for `spatial`, powers of two and multiples of it; part of the job, as grains are",
};

pub const KIND: StrategyKind = StrategyKind {
    name: "spatial",
    doc: "spatial parallelism: workers share the rows and columns of every image",
    keys: &[RANKS, TILES, LAYERS],
    read: |settings| Ok(read(settings)?.map(|one| Arc::new(one) as Arc<dyn Strategy>)),
};

fn read(settings: &Settings) -> Result<Option<Spatial>, SettingError> {
    let (ranks, tiles) = (RANKS.pair(settings)?, TILES.pair(settings)?);
    if let Some(odd) = tiles.iter().find(|count| !count.is_power_of_two()) {
        let message = format!("is {tiles:?}, but {odd} is not a power of two");
        let hint = format!("write {} or {} instead", odd.next_power_of_two() / 2, odd.next_power_of_two());
        return Err(settings.wrong(TILES.name, message, hint));
    }
    let mut spatial = Spatial { layers: Layers::read(settings)?, ..Spatial::new(ranks, tiles) };
    let of_layers = spatial.layers.ranks(Way::Spatial);
    if ranks == [1, 1] && of_layers > 1 {
        spatial.ranks = [of_layers, 1];
        spatial.tiles[0] = tiles[0].max(of_layers.next_power_of_two());
        spatial.of_layers = true;
    }
    let is_chosen = spatial.ranks != [1, 1] || spatial.tiles != [1, 1];
    spatial.tensor = is_chosen && settings.count(TENSOR, 1, 1)? == 1 && spatial.layers.ranks(Way::Tensor) > 1;
    Ok(is_chosen.then_some(spatial))
}

/// Whether a job cuts images.
pub(crate) fn is_chosen(settings: &Settings) -> Result<bool, SettingError> {
    Ok(read(settings)?.is_some())
}

/// Spatial parallelism with its settings.
#[derive(Clone, Debug)]
pub struct Spatial {
    /// Workers along rows and columns.
    pub ranks: [usize; 2],
    pub tiles: [usize; 2],
    /// Layers that are split otherwise.
    layers: Layers,
    /// Only what a line of theirs names is cut.
    of_layers: bool,
    /// What a line of theirs gives to `tensor` is shared by the workers of the rows.
    tensor: bool,
}

impl Spatial {
    /// So many workers along rows and columns, and so many tiles; all layers alike.
    pub fn new(ranks: [usize; 2], tiles: [usize; 2]) -> Self {
        Self { ranks, tiles, layers: Layers::default(), of_layers: false, tensor: false }
    }

    /// Slices along a side for so many ranks: those of the job, or if it does not promise its bits one each.
    fn slices(&self, side: usize, ranks: usize) -> usize {
        if self.tiles[side].is_multiple_of(ranks) { self.tiles[side] } else { ranks }
    }

    /// Refuses a model without images, and images that are too small.
    fn check_images(&self, graph: &Graph, mesh: &Mesh) -> Result<(), Refusal> {
        let Some(image) = image_of(graph) else {
            let message = "cuts images, but the model has none";
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

impl Spatial {
    /// Layers that have whole planes, and those that cut them.
    fn planes(&self, graph: &Graph, side: usize) -> Planes {
        let is_whole = |layer: &String| match self.layers.of(Way::Spatial, layer) {
            Some(ranks) => ranks == 1,
            None => self.of_layers,
        };
        let (whole, cut): (Vec<String>, Vec<String>) = layers_of(graph).into_iter().partition(is_whole);
        // Without exceptions planes are cut from the images on.
        let starts = if whole.is_empty() { Vec::new() } else { cut };
        Planes { dim: DIMS[side], whole, starts }
    }

    /// What decides along a side: planes are cut, and weights are not, but for those of layers that these workers share.
    fn rules(&self, graph: &Graph, training: &Graph, side: usize) -> Rules {
        let shared = match self.tensor && side == 0 {
            true => self.layers.shared_params(Way::Tensor, training),
            false => BTreeMap::new(),
        };
        let is_shared = |name: &String| shared.get(layer_of(name)).is_some_and(|own| own.contains(name));
        let whole = graph.params().map(|(_, op)| op.name.clone()).filter(|name| !is_shared(name)).collect();
        Rules { whole, planes: Some(self.planes(training, side)), ..Rules::default() }
    }

    /// One side cut.
    fn cut(
        &self,
        graph: Graph,
        training: TrainingGraphs<'_>,
        purpose: Purpose,
        group: (usize, usize, &Mesh),
    ) -> Result<Graph, Refusal> {
        let (side, slices, mesh) = group;
        let mut rules = self.rules(&graph, training.whole, side);
        // Weights are cut with the first side alone.
        if let (Purpose::Evaluation { .. }, true, 0) = (purpose, self.tensor, side) {
            // Weights lie as training left them.
            let trained = batch_norm_parts::in_steps(training.here, |_| true);
            rules.fixed = plan(&trained, slices, &self.rules(&trained, training.whole, side)).named(&trained);
        }
        let plan = plan(&graph, slices, &rules);
        self.check_layers(&graph, &plan, training.whole, side)?;
        let (ranks, rank) = (mesh.size(AXES[side]), mesh.coordinate(AXES[side]));
        Ok(lower(&graph, &plan, &Group { axis: AXES[side].into(), ranks, rank }))
    }

    /// Refuses numbers in lines about layers.
    fn check_lines(&self, job: Facts) -> Result<(), Refusal> {
        match self.of_layers {
            true => self.layers.check_ranks(Way::Spatial, self.ranks[0])?,
            false => self.layers.check_exceptions(Way::Spatial)?,
        }
        if self.of_layers && job.reproducible {
            self.layers.check_powers(Way::Spatial)?;
        }
        match self.tensor {
            // Whoever does all tiles does all parts of these layers, too.
            true if self.ranks == [1, 1] => self.layers.check_ranks(Way::Tensor, self.tiles[0]),
            true => self.layers.check_ranks(Way::Tensor, self.ranks[0]),
            false => Ok(()),
        }
    }

    /// Refuses lines about layers that cannot be split so.
    fn check_layers(&self, graph: &Graph, plan: &PartitionPlan, training: &Graph, side: usize) -> Result<(), Refusal> {
        let is_cut = |layer: &str| {
            let mut own = graph.nodes.iter().zip(&plan.choices).filter(|(node, _)| *node.scope == *layer);
            own.any(|(node, choice)| {
                matches!(choice, Choice::Parts(_)) && node.inputs.iter().any(|id| graph.ty(*id).rank() == 4)
            })
        };
        let hint = "only layers of images with as many rows as there are tiles can be; leave this one out";
        if side == 0 && self.tiles[0] > 1 {
            self.layers.check_shared(Way::Spatial, is_cut, training, hint)?;
        }
        let named = plan.named(graph);
        let is_split = |layer: &str| named.iter().any(|(name, own)| layer_of(name) == layer && own.cut().is_some());
        match self.tensor && side == 0 {
            true => {
                self.layers.check_shared(Way::Tensor, is_split, training, "leave the layer whole, or use fewer `tiles`")
            }
            false => Ok(()),
        }
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
    fn is_of_layers(&self) -> bool {
        self.of_layers
    }
    fn check(&self, job: Facts, _: &[&dyn Strategy]) -> Result<(), Refusal> {
        self.check_lines(job)?;
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
    fn split(
        &self,
        graph: Graph,
        training: TrainingGraphs<'_>,
        purpose: Purpose,
        mesh: &Mesh,
    ) -> Result<Graph, Refusal> {
        self.check_images(training.whole, mesh)?;
        self.layers.check_names(training.whole)?;
        let mut graph = batch_norm_parts::in_steps(&graph, |_| true);
        for (side, axis) in AXES.into_iter().enumerate() {
            let slices = self.slices(side, mesh.size(axis));
            if slices > 1 {
                graph = self.cut(graph, training, purpose, (side, slices, mesh))?;
            }
        }
        Ok(graph)
    }
    fn layout(&self) -> Vec<(&'static str, usize)> {
        vec![("tiles", self.tiles.iter().product())]
    }
}
