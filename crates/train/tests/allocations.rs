//! A step in steady state allocates nothing, on one thread and on two, with one lane and with two, alone and as one of
//! two workers.

use kolo_comm::{Bootstrap, Communicator, Fault, Watch, shm};
use kolo_exec::Options;
use kolo_models::MODELS;
use kolo_train::{Job, Trainer, job_file};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // The first thread is the test harness, which has its own reasons to allocate.
        // SAFETY: asks for two numbers.
        if unsafe { libc::gettid() != libc::getpid() } {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
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

/// The counter is that of the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[test]
fn a_steady_step_allocates_nothing() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let jobs = [
        ("kind = \"cnn\"\ndropout = 0.2", "builtin:digits", "adamw"),
        ("kind = \"mlp\"\nhidden = [16, 16]", "builtin:playground", "sgd"),
        ("kind = \"gpt\"\nlayers = 2\nwidth = 32\nheads = 4\ndropout = 0.1", "builtin:addition", "lamb"),
        ("kind = \"lstm\"\nlayers = 2\nwidth = 16", "builtin:waves", "adagrad"),
        ("kind = \"resnet18\"\nwidth = 16\nimage = [3, 8, 8]", "synthetic:images", "lars"),
        ("kind = \"resnet50\"\nimage = [3, 16, 16]", "synthetic:images", "rmsprop"),
    ];
    for (model, source, optimizer) in jobs {
        let text = format!(
            "[model]\n{model}\n[data]\nsource = \"{source}\"\nbatch = 8\ngrains = 4\n[train]\nsteps = 8\n\
             optimizer = {{ kind = \"{optimizer}\", lr = 1e-4 }}\nclip = 1.0\n"
        );
        // The largest shows nothing that the others do not show with fewer lanes.
        let layouts: &[(usize, usize)] = if model.contains("resnet50") { &[(2, 2)] } else { &[(1, 1), (2, 1), (2, 2)] };
        for (threads, lanes) in layouts.iter().copied() {
            expect_none(&text, Options { threads, lanes, grains: 4, slots: 1, ways: 1 });
        }
    }
    // One grain and no clipping: updates take gradients as they are made.
    let text = "[model]\nkind = \"mlp\"\nhidden = [64, 64]\n[data]\nsource = \"synthetic:features\"\nbatch = 8\ngrains = 1\n\
        [train]\nsteps = 8\n";
    expect_none(text, Options::single(1));
    expect_none(text, Options::single(2));
    // Loaders make samples while steps are counted.
    for loading in ["prefetch = 0", "prefetch = 1\nthreads = 1", "prefetch = 3\nthreads = 2"] {
        let text = format!(
            "[model]\nkind = \"mlp\"\n[data]\nsource = \"builtin:digits\"\nbatch = 8\ngrains = 4\n{loading}\n[train]\nsteps = 40\n"
        );
        expect_none(&text, Options { threads: 2, lanes: 2, grains: 4, slots: 1, ways: 1 });
    }
}

/// Of memory, in steps of this job after the first.
fn expect_none(text: &str, options: Options) {
    let root = job_file::parse(text, "test.toml").unwrap();
    let job = Arc::new(Job::read(&root, MODELS).unwrap());
    let mut trainer = Trainer::new(job, options).unwrap();
    trainer.step().unwrap();
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for _ in 0..3 {
        trainer.step().unwrap();
    }
    let made = ALLOCATIONS.load(Ordering::Relaxed) - before;
    assert_eq!(made, 0, "{made} allocations in three steps with {options:?} of\n{text}");
}

/// Two threads of this process that show each other their bytes.
struct Pair {
    rank: usize,
    table: Arc<(Mutex<[Vec<u8>; 2]>, Barrier)>,
}

impl Bootstrap for Pair {
    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Fault> {
        let (table, barrier) = &*self.table;
        table.lock().unwrap()[self.rank] = mine.to_vec();
        barrier.wait();
        let all = table.lock().unwrap().to_vec();
        barrier.wait();
        Ok(all)
    }
}

#[test]
fn a_steady_step_of_two_workers_allocates_nothing() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let text = "[model]\nkind = \"gpt\"\nlayers = 2\nwidth = 32\nheads = 4\n[data]\nsource = \"builtin:addition\"\nbatch = 8\n\
                grains = 4\n[train]\nsteps = 8\noptimizer = { kind = \"adamw\" }\nclip = 1.0\n[parallel]\nbucket_mib = 0.01\n";
    for zero in [0, 1] {
        let text = format!("{text}zero = {zero}\n");
        let root = job_file::parse(&text, "test.toml").unwrap();
        let job = Arc::new(Job::read(&root, MODELS).unwrap());
        let table = Arc::new((Mutex::new([Vec::new(), Vec::new()]), Barrier::new(2)));
        let both = Barrier::new(2);
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let (job, table, both) = (Arc::clone(&job), Arc::clone(&table), &both);
                scope.spawn(move || {
                    let watch = Watch::alone();
                    let transport = shm::connect(rank, 2, Arc::clone(&watch), &mut Pair { rank, table }).unwrap();
                    let world = Arc::new(Communicator::new(transport, watch, true));
                    let mut trainer = Trainer::among(job, 1, world).unwrap();
                    trainer.step().unwrap();
                    both.wait();
                    let before = ALLOCATIONS.load(Ordering::Relaxed);
                    both.wait();
                    for _ in 0..3 {
                        trainer.step().unwrap();
                    }
                    both.wait();
                    let made = ALLOCATIONS.load(Ordering::Relaxed) - before;
                    both.wait();
                    assert_eq!(made, 0, "zero = {zero}: {made} allocations in three steps of two workers");
                });
            }
        });
    }
}
