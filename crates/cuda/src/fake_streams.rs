//! The streams of the fake driver: work is done when it is started, or, to find a wait that is missing, as late as the calls allow.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};

/// When work runs that is started on a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Pace {
    /// When it is started.
    #[default]
    AtOnce,
    /// When somebody waits for it.
    Late,
    /// On this stream when somebody waits for it, on all others as soon as the events that they wait for have happened.
    LateOn(usize),
}

enum Task {
    Work(Box<dyn FnOnce()>),
    Record { event: usize, time: usize },
    Wait { event: usize, time: usize },
}

/// An event: where and how often it was recorded, and how many of these have happened.
#[derive(Clone, Copy, Debug, Default)]
struct Recorded {
    stream: usize,
    times: usize,
    happened: usize,
}

#[derive(Default)]
struct Streams {
    pace: Pace,
    queues: HashMap<usize, VecDeque<Task>>,
    events: HashMap<usize, Recorded>,
}

thread_local! {
    static STREAMS: RefCell<Streams> = RefCell::default();
}

/// Changes when work runs on this thread. What was started before is done.
pub(crate) fn set_pace(pace: Pace) {
    let streams: Vec<usize> = STREAMS.with_borrow(|all| all.queues.keys().copied().collect());
    streams.into_iter().for_each(synchronize);
    STREAMS.with_borrow_mut(|all| *all = Streams { pace, ..Streams::default() });
}

pub(crate) fn start(stream: usize, work: impl FnOnce() + 'static) {
    if STREAMS.with_borrow(|all| all.pace == Pace::AtOnce) {
        return work();
    }
    push(stream, Task::Work(Box::new(work)));
}

pub(crate) fn record(event: usize, stream: usize) {
    let time = STREAMS.with_borrow_mut(|all| {
        let known = all.events.entry(event).or_default();
        (known.stream, known.times) = (stream, known.times + 1);
        known.times
    });
    push(stream, Task::Record { event, time });
}

pub(crate) fn wait(stream: usize, event: usize) {
    let time = STREAMS.with_borrow(|all| all.events.get(&event).map_or(0, |event| event.times));
    push(stream, Task::Wait { event, time });
}

pub(crate) fn synchronize(stream: usize) {
    while step(stream) {}
}

pub(crate) fn synchronize_event(event: usize) {
    let Recorded { stream, times, .. } = recorded(event);
    while recorded(event).happened < times && step(stream) {}
}

fn recorded(event: usize) -> Recorded {
    STREAMS.with_borrow(|all| all.events.get(&event).copied().unwrap_or_default())
}

fn push(stream: usize, task: Task) {
    let pace = STREAMS.with_borrow_mut(|all| {
        all.queues.entry(stream).or_default().push_back(task);
        all.pace
    });
    match pace {
        Pace::AtOnce => synchronize(stream),
        Pace::Late => (),
        Pace::LateOn(late) => run_ready(late),
    }
}

/// Runs what the other streams can do without waiting.
fn run_ready(late: usize) {
    let streams =
        || STREAMS.with_borrow(|all| all.queues.keys().copied().filter(|one| *one != late).collect::<Vec<_>>());
    let ready = |stream: usize| {
        let front = STREAMS.with_borrow(|all| match all.queues[&stream].front() {
            Some(Task::Wait { event, time }) => Some((*event, *time)),
            Some(_) => Some((0, 0)),
            None => None,
        });
        front.is_some_and(|(event, time)| recorded(event).happened >= time)
    };
    while let Some(stream) = streams().into_iter().find(|stream| ready(*stream)) {
        step(stream);
    }
}

/// Does the next thing of a stream, and before it whatever it waits for; whether there was any.
fn step(stream: usize) -> bool {
    let task = STREAMS.with_borrow_mut(|all| all.queues.get_mut(&stream)?.pop_front());
    match task {
        None => return false,
        Some(Task::Work(work)) => work(),
        Some(Task::Record { event, time }) => STREAMS.with_borrow_mut(|all| {
            let known = all.events.entry(event).or_default();
            known.happened = known.happened.max(time);
        }),
        Some(Task::Wait { event, time }) => {
            let on = recorded(event).stream;
            while recorded(event).happened < time && step(on) {}
        }
    }
    true
}
