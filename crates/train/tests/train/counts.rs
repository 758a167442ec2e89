//! Counts that can be checked by hand.

use crate::job;
use kolo_exec::{Options, Program};
use kolo_parallel::Mesh;
use kolo_plan::{Cost, RunCost};
use kolo_train::step::{UpdateRule, optimise, training_graph};
use kolo_train::trainer::evaluation_bytes;

fn cost(model: &str, source: &str, batch: usize) -> Cost {
    let text = format!(
        "[model]\n{model}\n[data]\nsource = \"{source}\"\nbatch = {batch}\ngrains = 1\nsamples = 64\n[train]\nsteps = 1\noptimizer = {{ kind = \"adamw\" }}\n"
    );
    let job = job(&text);
    let graph =
        training_graph(&*job.model, &UpdateRule::all(&job.optimizer, job.clip), job.grain_batch(), job.grains).unwrap();
    kolo_plan::cost(&Program::cpu(optimise(graph), Options::single(1)))
}

#[test]
fn gpt2_has_its_parameters() {
    let gpt2 = cost(
        "kind = \"gpt\"\nlayers = 12\nwidth = 768\nheads = 12\ncontext = 1024\nvocab = 50257",
        "synthetic:tokens",
        1,
    );
    assert_eq!(gpt2.parameters, 124_439_808);
}

#[test]
fn resnet50_has_its_multiply_adds() {
    let resnet = cost("kind = \"resnet50\"", "synthetic:images", 2);
    assert_eq!(resnet.parameters, 25_557_032);
    let macs = resnet.product_flops.forward as f64 / 2.0 / 2.0;
    assert!((4.05e9..4.15e9).contains(&macs), "{macs:e}");
}

#[test]
fn resnet18_and_alexnet_have_their_parameters() {
    let resnet = cost("kind = \"resnet18\"\nimage = [3, 224, 224]\nclasses = 1000", "synthetic:images", 1);
    assert_eq!(resnet.parameters, 11_689_512);
    assert_eq!(cost("kind = \"alexnet\"", "synthetic:images", 1).parameters, 61_100_840);
}

#[test]
fn resnet152_takes_what_the_textbook_says() {
    let resnet = cost("kind = \"resnet152\"", "synthetic:images", 1);
    let macs = resnet.product_flops.forward as f64 / 2.0;
    assert!((11.4e9..11.6e9).contains(&macs), "{macs:e}");
    // 1.2 M images, 128 epochs; a pass costs three forwards, counted here from the graph itself.
    let per_sample = (resnet.product_flops.forward + resnet.product_flops.backward) as f64;
    let run = RunCost::new(per_sample, 3.0 * 224.0 * 224.0 * 4.0, 1.2e6, 128.0);
    assert!((run.flops / 1.05e19 - 1.0).abs() < 0.03, "{:e}", run.flops);
    assert!((run.flops_per_input_byte / 1.1e5 - 1.0).abs() < 0.05, "{}", run.flops_per_input_byte);
}

#[test]
fn a_linear_layer_is_two_flops_per_weight_and_sample() {
    let mlp = cost("kind = \"mlp\"\ninputs = 100\nhidden = [50]\nclasses = 10", "synthetic:features", 4);
    let weights = 100 * 50 + 50 * 10;
    assert_eq!(mlp.product_flops.forward, 2 * 4 * weights);
    // Backward: both weight gradients, and the one input gradient that a parameter needs.
    assert_eq!(mlp.product_flops.backward, 2 * 4 * (weights + 50 * 10));
    assert_eq!(mlp.memory.weights, 4 * (weights as usize + 60));
    assert_eq!(mlp.memory.optimizer, 2 * mlp.memory.weights);
}

#[test]
fn evaluations_take_little_memory() {
    let bytes = |model: &str, source: &str, samples: usize, rank: usize| {
        let data =
            format!("[data]\nsource = \"{source}\"\nbatch = 4\ngrains = 2\nsamples = {samples}\nholdout = 0.5\n");
        let job = job(&format!("[model]\n{model}\n{data}[train]\nsteps = 1\noptimizer = {{ kind = \"sgd\" }}\n"));
        evaluation_bytes(&job, &job.parallel, 1, &Mesh::data(2, rank).unwrap()).unwrap()
    };
    // The predictions of one sample take 8 MiB: four samples at a time, not 256.
    let gpt = "kind = \"gpt\"\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 128\nvocab = 16384";
    let large = bytes(gpt, "synthetic:tokens", 1024, 0);
    assert!((16 << 20..80 << 20).contains(&large), "{large}");
    // As many at a time as there are, however many; a rest is another batch, and one rank's turn.
    let mlp = "kind = \"mlp\"\ninputs = 8\nhidden = [2000]\nclasses = 2";
    let few = bytes(mlp, "synthetic:features", 128, 0);
    assert_eq!(few, bytes(mlp, "synthetic:features", 128, 1));
    assert_eq!(bytes(mlp, "synthetic:features", 512, 0), bytes(mlp, "synthetic:features", 1024, 0));
    assert!(bytes(mlp, "synthetic:features", 512 + 128, 0) < bytes(mlp, "synthetic:features", 512 + 128, 1));
}
