//! Pipelines of models that are narrow for what passes through them: weights are smaller than activations, so that sums over slices
//! are cut before they are added up, and parts of gradients have no layer of their own.

use crate::workers::{on_ranks, report};
use kolo_train::session::WorkerGroup;

const SCHEDULES: [&str; 5] = [
    "schedule = \"1f1b\"",
    "schedule = \"gpipe\"",
    "schedule = \"zero-bubble\"",
    "schedule = \"bidirectional\"",
    "schedule = \"interleaved\"\nchunks = 2",
];

/// Trains a model alone and with every schedule, tensor-parallel as well; its weights must be the same.
fn assert_schedules(model: &str, source: &str, train: &str, shared: &str) {
    let job = |parallel: &str| {
        crate::job(&format!(
            "[model]\n{model}\n[data]\nsource = \"{source}\"\nsamples = 16\nbatch = 4\ngrains = 4\n[train]\nsteps = 1\n{train}\n\
             [parallel]\nslices = 2\n{shared}\n{parallel}\n"
        ))
    };
    let alone = report(&job(""), WorkerGroup::Alone);
    for schedule in SCHEDULES {
        let job = job(&format!("tensor = 2\npipeline = 2\n{schedule}"));
        for other in on_ranks(4, |world| report(&job, WorkerGroup::Workers(world))) {
            assert_eq!(other.weights, alone.weights, "{model}, {shared}, {schedule}");
        }
    }
}

#[test]
fn transformers_of_many_tokens_have_one_workers_weights() {
    let gpt = "kind = \"gpt\"\nlayers = 4\nheads = 2\nwidth = 8\ncontext = 96\nvocab = 61";
    let llama = "kind = \"llama\"\nlayers = 4\nheads = 2\nwidth = 8\nhidden = 12\ncontext = 96\nvocab = 61";
    for model in [gpt, llama] {
        for sequence in ["tensor", "whole"] {
            assert_schedules(model, "synthetic:tokens", "", &format!("sequence = \"{sequence}\""));
        }
    }
}

#[test]
fn narrow_convolutions_of_large_images_have_one_workers_weights() {
    let resnet = "kind = \"resnet18\"\nwidth = 4\nimage = [3, 24, 21]\nclasses = 3";
    assert_schedules(resnet, "synthetic:images", "precision = \"bf16\"", "");
    assert_schedules("kind = \"cnn\"\nchannels = [2, 2, 2, 2]\nimage = [1, 33, 30]", "synthetic:images", "", "");
}

/// Weights that tensor ranks gather for the backward pass, of which data ranks keep shares.
#[test]
fn weights_gathered_twice_are_there_when_they_are_read() {
    let job = |parallel: &str| {
        crate::job(&format!(
            "[model]\nkind = \"resnet18\"\nwidth = 2\nimage = [1, 27, 22]\nclasses = 6\n[data]\nsource = \"synthetic:images\"\n\
             samples = 16\nbatch = 4\ngrains = 4\n[train]\nsteps = 1\n[parallel]\nslices = 2\n{parallel}\n"
        ))
    };
    let alone = report(&job(""), WorkerGroup::Alone);
    for schedule in SCHEDULES.into_iter().filter(|schedule| !schedule.contains("bidirectional")) {
        let job = job(&format!("tensor = 2\npipeline = 2\nzero = 3\n{schedule}"));
        for other in on_ranks(8, |world| report(&job, WorkerGroup::Workers(world))) {
            assert_eq!(other.weights, alone.weights, "{schedule}");
        }
    }
}
