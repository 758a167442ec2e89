//! A step in steady state allocates nothing, on one thread and on two, with one lane and with two.

use kolo_exec::Options;
use kolo_models::MODELS;
use kolo_train::{Job, Trainer, job_file};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract is the system's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, data: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(data, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_steady_step_allocates_nothing() {
    let jobs = [
        ("kind = \"cnn\"\ndropout = 0.2", "builtin:digits", "adamw"),
        ("kind = \"mlp\"\nhidden = [16, 16]", "builtin:playground", "sgd"),
        ("kind = \"gpt\"\nlayers = 2\nwidth = 32\nheads = 4\ndropout = 0.1", "builtin:addition", "lamb"),
        ("kind = \"lstm\"\nlayers = 2\nwidth = 16", "builtin:waves", "adagrad"),
        ("kind = \"resnet18\"\nimage = [3, 8, 8]", "synthetic:images", "lars"),
        ("kind = \"resnet50\"\nimage = [3, 16, 16]", "synthetic:images", "rmsprop"),
    ];
    for (model, source, optimizer) in jobs {
        let text = format!(
            "[model]\n{model}\n[data]\nsource = \"{source}\"\nbatch = 8\ngrains = 4\n[train]\nsteps = 8\n\
             optimizer = {{ kind = \"{optimizer}\", lr = 1e-4 }}\nclip = 1.0\n"
        );
        let root = job_file::parse(&text, "test.toml").unwrap();
        for (threads, lanes) in [(1, 1), (2, 1), (2, 2)] {
            let job = Arc::new(Job::read(&root, MODELS).unwrap());
            let mut trainer = Trainer::new(job, Options { threads, lanes, grains: 4 }).unwrap();
            trainer.step().unwrap();
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            for _ in 0..3 {
                trainer.step().unwrap();
            }
            let made = ALLOCATIONS.load(Ordering::Relaxed) - before;
            assert_eq!(made, 0, "{model}: {made} allocations in three steps on {threads} threads, {lanes} lanes");
        }
    }
}
