//! The candidates of a search: every combination that the numbers of devices, samples and layers allow.

use super::candidate::Candidate;
use kolo_parallel::Recompute;
use kolo_parallel::keys::SequenceSplit;
use kolo_parallel::schedules::USUAL;

/// What a job and a cluster allow.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchSpace {
    pub devices: usize,
    /// Samples of a step.
    pub batch: usize,
    /// Stages that the model can be cut to, at most.
    pub stages_max: usize,
    /// Ranks that may share a layer, at most, and the tokens of a sample; 1 if the model has none.
    pub tensor_max: usize,
    pub tokens_max: usize,
    pub zero_max: usize,
    /// How tokens may be shared.
    pub sequences: Vec<SequenceSplit>,
    pub recomputes: Vec<Recompute>,
    /// Families of pipeline schedules.
    pub schedules: Vec<&'static str>,
    /// Micro-batches of a data rank, at most.
    pub micro_batches_max: usize,
    /// Whether results must not depend on the number of workers: grains are then a power of two.
    pub reproducible: bool,
}

/// Chunks per rank of an interleaved pipeline that are tried.
const CHUNKS: [usize; 4] = [2, 3, 4, 8];

impl SearchSpace {
    /// All candidates on all devices, in an order that does not depend on anything else.
    pub fn candidates(&self) -> Vec<Candidate> {
        let mut found = Vec::new();
        for tensor in divisors(self.devices).filter(|tensor| *tensor <= self.tensor_max && tensor.is_power_of_two()) {
            for (sequence, tokens) in self.token_shares(tensor) {
                let rest = self.devices / tensor / tokens;
                for pipeline in divisors(rest).filter(|pipeline| *pipeline <= self.stages_max) {
                    let shape = Shape { data: rest / pipeline, pipeline, tensor, tokens, sequence };
                    self.extend(&shape, &mut found);
                }
            }
        }
        found
    }

    /// How tokens may be shared beside so many ranks of a layer, and among how many ranks of their own.
    fn token_shares(&self, tensor: usize) -> Vec<(SequenceSplit, usize)> {
        let mut shares = vec![(SequenceSplit::Whole, 1)];
        for sequence in &self.sequences {
            match sequence {
                SequenceSplit::Whole => {}
                SequenceSplit::Tensor if tensor > 1 => shares.push((SequenceSplit::Tensor, 1)),
                SequenceSplit::Tensor => {}
                SequenceSplit::Heads | SequenceSplit::Context => {
                    let ranks = divisors(self.devices / tensor).filter(|ranks| *ranks > 1 && ranks.is_power_of_two());
                    shares.extend(ranks.filter(|ranks| *ranks <= self.tokens_max).map(|ranks| (*sequence, ranks)));
                }
            }
        }
        shares
    }

    fn extend(&self, shape: &Shape, found: &mut Vec<Candidate>) {
        let Shape { data, pipeline, tensor, tokens, sequence } = *shape;
        if !self.batch.is_multiple_of(data) || self.reproducible && !data.is_power_of_two() {
            return;
        }
        let counts = divisors(self.batch / data).take_while(|count| *count <= self.micro_batches_max);
        for micro_batches in counts.filter(|count| !self.reproducible || count.is_power_of_two()) {
            for (schedule, chunks) in self.pipelines(pipeline, micro_batches) {
                for zero in 0..=if data > 1 { self.zero_max } else { 0 } {
                    let differ = Recompute::that_differ(tensor > 1 || tokens > 1);
                    for recompute in self.recomputes.iter().copied().filter(|one| differ.contains(one)) {
                        found.push(Candidate {
                            data,
                            pipeline,
                            tensor,
                            tokens,
                            sequence,
                            slices: [1; 2],
                            zero,
                            recompute,
                            layers: None,
                            micro_batches,
                            schedule,
                            chunks,
                        });
                    }
                }
            }
        }
    }

    /// Schedules that a pipeline of so many ranks may run so many micro-batches with.
    fn pipelines(&self, ranks: usize, micro_batches: usize) -> Vec<(&'static str, usize)> {
        if ranks == 1 {
            return vec![(USUAL.name, 1)];
        }
        let mut found = Vec::new();
        for schedule in self.schedules.iter().copied() {
            match schedule {
                "interleaved" if micro_batches.is_multiple_of(ranks) => {
                    let chunks = CHUNKS.into_iter().filter(|chunks| ranks * chunks <= self.stages_max);
                    found.extend(chunks.map(|chunks| (schedule, chunks)));
                }
                "interleaved" => {}
                // Half of the micro-batches goes each way.
                "bidirectional" if ranks.is_multiple_of(2) && micro_batches.is_multiple_of(2) => {
                    found.push((schedule, 1))
                }
                "bidirectional" => {}
                _ => found.push((schedule, 1)),
            }
        }
        found
    }
}

#[derive(Clone, Copy)]
struct Shape {
    data: usize,
    pipeline: usize,
    tensor: usize,
    tokens: usize,
    sequence: SequenceSplit,
}

/// All divisors of a number, ascending.
pub fn divisors(number: usize) -> impl Iterator<Item = usize> {
    (1..=number).filter(move |one| number.is_multiple_of(*one))
}
