//! Counts that can be checked by hand.

use crate::job;
use kolo_exec::{Offload, Options, Program};
use kolo_parallel::Mesh;
use kolo_plan::anatomy::Anatomy;
use kolo_plan::cluster::Cluster;
use kolo_plan::device::{Device, DeviceTable, Precision};
use kolo_plan::step_model::StepModel;
use kolo_plan::{Cost, RunCost, compose};
use kolo_train::step::{UpdateRule, optimise, training_graph};
use kolo_train::step_model::{anatomy_of, layout_of};
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

#[test]
fn the_zoo_has_torchvisions_and_llamas_parameters() {
    let images = |kind: &str| cost(&format!("kind = \"{kind}\""), "synthetic:images", 2).parameters;
    assert_eq!(images("resnet101"), 44_549_160);
    assert_eq!(images("vgg16"), 138_357_544);
    // torchvision's 27,161,264 without the auxiliary classifier.
    assert_eq!(images("inception_v3"), 23_834_568);
    let llama = plan_job(LLAMA_8B, "zero = 0", 1, 1);
    assert_eq!(anatomy_of(&llama, &llama.parallel, 1, true).unwrap().parameters(), 8_030_261_248.0);
}

const LLAMA_8B: &str = "kind = \"llama\"\nlayers = 32\nwidth = 4096\nheads = 32\nkv_heads = 8\nhidden = 14336\nvocab = 128256\ncontext = 8192";

/// A job that is planned, not run: of any size.
fn plan_job(model: &str, parallel: &str, batch: usize, grains: usize) -> std::sync::Arc<kolo_train::Job> {
    job(&format!(
        "[job]\nreproducible = false\n[model]\n{model}\n[data]\nsource = \"synthetic:tokens\"\nsamples = 65536\nbatch = {batch}\ngrains = {grains}\n[train]\nsteps = 1\noptimizer = {{ kind = \"adamw\" }}\n[parallel]\n{parallel}\n"
    ))
}

fn gpt_flops_per_token(layers: usize, width: usize, heads: usize, vocab: usize, context: usize) -> (f64, f64) {
    let model = format!(
        "kind = \"gpt\"\nlayers = {layers}\nwidth = {width}\nheads = {heads}\nvocab = {vocab}\ncontext = {context}"
    );
    let job = plan_job(&model, "zero = 0", 1, 1);
    let anatomy = anatomy_of(&job, &job.parallel, 1, true).unwrap();
    (anatomy.model_flops / context as f64, anatomy.parameters())
}

/// GPT-3: 3.14e23 operations for 300 G tokens, and 34 days on 1,024 A100 at 140 TFLOP/s that compute every layer again
/// (arXiv 2005.14165, table D.1; arXiv 2104.04473, section 5.1).
#[test]
fn gpt3_takes_what_the_papers_say() {
    let (per_token, parameters) = gpt_flops_per_token(96, 12288, 96, 50257, 2048);
    assert!((parameters / 174.6e9 - 1.0).abs() < 0.01, "{parameters:e}");
    let run = RunCost::new(per_token, 4.0, 300e9, 1.0);
    assert!((run.flops / 3.14e23 - 1.0).abs() < 0.06, "{:e}", run.flops);
    let again = RunCost::new(per_token * 4.0 / 3.0, 4.0, 300e9, 1.0);
    let fleet = kolo_plan::Fleet { devices: 1024, flops: 312e12, utilisation: 140.0 / 312.0, price_per_hour: None };
    let days = again.days(&fleet);
    assert!((33.0..37.0).contains(&days), "{days}");
}

/// Chinchilla's rule: six operations for each parameter and token, but for attention and the embedding's place.
#[test]
fn training_takes_six_operations_per_parameter_and_token() {
    for (layers, width, heads, context) in [(80, 8192, 64, 2048), (24, 2304, 24, 2048), (12, 768, 12, 1024)] {
        let (per_token, parameters) = gpt_flops_per_token(layers, width, heads, 32000, context);
        // Two products over all pairs of tokens forward, four backward: scores that are computed again are not the model's.
        let attention = 12.0 * (layers * width * context) as f64;
        let positions = (context * width) as f64;
        let rule = 6.0 * (parameters - positions) + attention;
        assert!((per_token / rule - 1.0).abs() < 0.01, "{layers} layers: {per_token:e} {rule:e}");
    }
}

/// What is counted from four layers is what is counted from all of them.
#[test]
fn a_deep_model_is_counted_from_a_shallow_one() {
    for (kind, parallel) in [("gpt", "tensor = 2\nslices = 2"), ("llama", "zero = 1")] {
        let model = format!("kind = \"{kind}\"\nlayers = 9\nwidth = 64\nheads = 4\nvocab = 96\ncontext = 32");
        let few = plan_job(&model, parallel, 4, 2);
        let all = few.model.with_layers(9).unwrap();
        let counted = |recompute| few.parallel.clone().recomputing(recompute);
        for recompute in kolo_parallel::Recompute::ALL {
            let parallel = counted(recompute);
            let stretched = anatomy_of(&few, &parallel, 2, true).unwrap();
            let whole = kolo_train::step_model::count_whole(&few, &*all, &parallel, 2, true).unwrap();
            let total = |anatomy: &kolo_plan::anatomy::Anatomy| {
                let units = || anatomy.order.iter().map(|at| &anatomy.units[*at]);
                let passes = |unit: &kolo_plan::anatomy::Unit| {
                    let all = [&unit.forward, &unit.input, &unit.weight].map(|pass| {
                        let flops: f64 = pass.calls.iter().map(|call| call.flops).sum();
                        let reals: f64 = pass.calls.iter().map(|call| call.reals).sum();
                        let sent: f64 = pass.exchanges.iter().map(|one| one.reals).sum();
                        [flops, reals, sent, pass.calls.len() as f64]
                    });
                    all.into_iter().flatten().collect::<Vec<f64>>()
                };
                let sums = units().map(passes).reduce(|a, b| a.iter().zip(&b).map(|(a, b)| a + b).collect()).unwrap();
                let saved: f64 = units().map(|unit| unit.saved.reals).sum();
                (anatomy.order.len(), anatomy.parameters(), anatomy.model_flops, saved, sums)
            };
            assert_eq!(total(&stretched), total(&whole), "{kind} {recompute:?}");
        }
    }
}

/// Layers that differ in what they compute again count as they do where all layers compute the same again.
#[test]
fn layers_that_differ_are_counted_one_by_one() {
    let models = [
        ("kind = \"gpt\"\nlayers = 5\nwidth = 64\nheads = 4\nvocab = 96\ncontext = 32", "tensor = 2\nslices = 2"),
        ("kind = \"gpt\"\nlayers = 4\nwidth = 64\nheads = 4\nvocab = 96\ncontext = 32\ndropout = 0.1", ""),
        ("kind = \"llama\"\nlayers = 4\nwidth = 64\nheads = 4\nvocab = 96\ncontext = 32", "zero = 1"),
    ];
    for (model, parallel) in models {
        let job = plan_job(model, parallel, 4, 2);
        let lines = [
            ("h.0", "blocks"),
            ("h.2", "selective"),
            ("*.3", "blocks"),
            ("blocks.2", "selective"),
            ("layers.0", "selective"),
        ];
        let names = anatomy_of(&job, &job.parallel, 2, true).unwrap().layers;
        assert!(names.len() >= 4, "{names:?}");
        let mut memory = kolo_graph::settings::Settings::new("memory", "job.toml:1");
        let layers = memory.table_mut("layers", "job.toml:2").unwrap();
        for (pattern, what) in
            lines.iter().filter(|(pattern, _)| names.iter().any(|name| kolo_base::matches_pattern(pattern, name)))
        {
            layers.set(pattern, "job.toml:3", kolo_graph::settings::Setting::Text((*what).into()));
        }
        let plan = kolo_parallel::RecomputePlan::read(&memory).unwrap();
        let parallel = job.parallel.clone().recomputing(plan);
        for fuses in [true, false] {
            let mixed = anatomy_of(&job, &parallel, 2, fuses).unwrap();
            let whole = kolo_train::step_model::count_whole(&job, &*job.model, &parallel, 2, fuses).unwrap();
            assert_eq!(mixed.order.len(), whole.order.len());
            for (at, (one, other)) in mixed.order.iter().zip(&whole.order).enumerate() {
                assert_eq!(mixed.units[*one], whole.units[*other], "unit {at} of {model}, fused: {fuses}");
            }
        }
    }
}

/// Where weights are smaller than what is computed with them, their gradients are summed whole and each rank keeps its part: whole
/// gradients of one layer are gone before the next one is computed, so layers of any depth take the same.
#[test]
fn gradients_that_are_summed_whole_do_not_pile_up() {
    let model = "kind = \"llama\"\nlayers = 6\nwidth = 64\nheads = 4\nhidden = 256\nvocab = 96\ncontext = 128";
    let job = plan_job(model, "tensor = 2\nslices = 2\nsequence = \"tensor\"", 64, 2);
    let whole = kolo_train::step_model::count_whole(&job, &*job.model, &job.parallel, 32, true).unwrap();
    let layer = &whole.units[whole.order[2]];
    let passes = [&layer.input, &layer.weight].into_iter().flat_map(|pass| &pass.exchanges);
    assert!(passes.clone().any(|one| one.reals == 256.0 * 64.0), "{:?}", passes.collect::<Vec<_>>());
    assert!(whole.order[2..6].iter().all(|unit| *unit == whole.order[2]), "{:?}", whole.order);
}

/// What is offloaded takes nothing of the device's memory, and the update as long as the host takes for it.
#[test]
fn an_offloaded_optimizer_is_the_hosts() {
    let model = "kind = \"gpt\"\nlayers = 4\nwidth = 256\nheads = 4\ncontext = 128\nvocab = 1024";
    let job = plan_job(model, "zero = 0", 8, 1);
    let anatomy = anatomy_of(&job, &job.parallel, 8, true).unwrap();
    let layout = layout_of(&job, 1, Precision::Bf16).unwrap();
    let h200 = DeviceTable::built_in().unwrap().find("h200").unwrap().clone();
    let cluster = Cluster::of_one(h200);
    let role = |anatomy: &Anatomy| compose(anatomy, &layout, &cluster).unwrap().roles[0].clone();
    let (own, hosts) = (role(&anatomy), role(&anatomy.clone().offloading(Offload::Optimizer)));
    assert_eq!((own.memory.optimizer, own.memory.weights), (8.0 * own.parameters, 6.0 * own.parameters));
    assert_eq!((hosts.memory.optimizer, hosts.memory.weights), (0.0, 2.0 * own.parameters), "half-precision weights");
    assert_eq!(hosts.memory.gradients, own.memory.gradients);
    assert!(hosts.update.seconds() > 10.0 * own.update.seconds(), "a host is slower than a GPU's memory");
}

/// Weights that the host keeps are on the device in part, and a step waits for those that come more slowly than it computes.
#[test]
fn streamed_weights_take_time_for_memory() {
    let model = "kind = \"gpt\"\nlayers = 8\nwidth = 256\nheads = 4\ncontext = 128\nvocab = 512";
    let job = plan_job(model, "zero = 0", 8, 1);
    let anatomy = anatomy_of(&job, &job.parallel, 8, true).unwrap();
    let layout = layout_of(&job, 1, Precision::Bf16).unwrap();
    let h200 = DeviceTable::built_in().unwrap().find("h200").unwrap().clone();
    let model = |offload: Offload, host_bandwidth: f64| {
        let cluster = Cluster::of_one(Device { host_bandwidth, ..h200.clone() });
        compose(&anatomy.clone().offloading(offload), &layout, &cluster).unwrap()
    };
    let passes = |model: &StepModel| {
        model.stages.iter().map(|stage| stage.forward.seconds() + stage.input.seconds()).sum::<f64>()
    };
    let (kept, streamed) = (model(Offload::Optimizer, 55e9), model(Offload::Weights, 55e9));
    let (own, hosts) = (kept.roles[0].memory, streamed.roles[0].memory);
    assert_eq!(hosts.weights, 0.0);
    assert!(hosts.total() < own.total(), "{hosts:?} {own:?}");
    // At a rate at which all is there in time, nothing is waited for; else at least the copies of all weights, twice.
    assert_eq!(passes(&model(Offload::Weights, 1e15)), passes(&kept));
    let slow = model(Offload::Weights, 1e6);
    let copies = 2.0 * 2.0 * slow.roles[0].parameters / 1e6;
    assert!((passes(&slow) / copies - 1.0).abs() < 0.1, "{} {copies}", passes(&slow));
}
