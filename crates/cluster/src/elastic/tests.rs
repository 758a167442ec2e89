use super::*;
use crate::introduction::Manifest;
use kolo_comm::watch::Activity;

const CONFIG: ElasticConfig = ElasticConfig {
    job: 7,
    workers: 4,
    min: 2,
    grains: 8,
    restarts: 0,
    deadlines: Deadlines { heartbeat_ms: 1000 },
    supervised: true,
    sharded: false,
};

struct Job {
    core: Elastic,
    now_ms: u64,
}

impl Job {
    fn new(config: ElasticConfig) -> Self {
        Self { core: Elastic::new(config, &vec!["a".into(); config.workers], 0), now_ms: 0 }
    }

    fn step(&mut self, event: CoordinatorEvent) -> Actions {
        self.now_ms += 10;
        self.core.step(self.now_ms, event)
    }

    fn say(&mut self, link: usize, generation: u32, message: ControlMessage) -> Actions {
        self.step(CoordinatorEvent::Message { link, envelope: Envelope { job: 7, generation, message } })
    }

    fn hello(&mut self, link: usize, rank: usize, seed: &str) -> Actions {
        let manifest = Manifest::new([("job.seed".to_string(), seed.to_string())]);
        let hello =
            Hello { rank, world: 4, host: "a".into(), pid: 1, version: "1".into(), role: String::new(), manifest };
        self.say(link, 0, ControlMessage::Hello(hello))
    }

    /// Four workers in their first generation.
    fn formed(config: ElasticConfig) -> Self {
        let mut job = Self::new(config);
        let last = (0..4).map(|worker| job.hello(worker, worker, "1")).last().unwrap();
        assert_eq!(assigned(&last), [(0, 0, 4), (1, 1, 4), (2, 2, 4), (3, 3, 4)]);
        job
    }
}

/// Link, rank and world of each assignment.
fn assigned(actions: &[CoordinatorAction]) -> Vec<(usize, usize, usize)> {
    let look = |action: &CoordinatorAction| match action {
        CoordinatorAction::Send { link, envelope: Envelope { message: ControlMessage::Assign(place), .. } } => {
            Some((*link, place.rank, place.world))
        }
        _ => None,
    };
    actions.iter().filter_map(look).collect()
}

fn places(actions: &[CoordinatorAction]) -> Vec<crate::message::Assignment> {
    let look = |action: &CoordinatorAction| match action {
        CoordinatorAction::Send { envelope: Envelope { message: ControlMessage::Assign(place), .. }, .. } => {
            Some(place.clone())
        }
        _ => None,
    };
    actions.iter().filter_map(look).collect()
}

fn told_end(actions: &[CoordinatorAction]) -> Option<&CoordinatorAction> {
    actions.iter().find(|action| matches!(action, CoordinatorAction::Notice(Notice::Ending { .. })))
}

fn told(actions: &[CoordinatorAction], wanted: &ControlMessage) -> Vec<usize> {
    let look = |action: &CoordinatorAction| match action {
        CoordinatorAction::Send { link, envelope } if envelope.message == *wanted => Some(*link),
        _ => None,
    };
    actions.iter().filter_map(look).collect()
}

fn text(actions: &[CoordinatorAction]) -> String {
    let look = |action: &CoordinatorAction| match action {
        CoordinatorAction::Notice(Notice::Ending { text, .. } | Notice::Lost { text, .. }) => Some(text.clone()),
        _ => None,
    };
    actions.iter().find_map(look).unwrap_or_default()
}

const KILLED: Exit = Exit::Signal(9);
const NOBODY: [usize; 0] = [];

#[test]
fn three_of_four_go_on_as_two_and_a_spare() {
    let mut job = Job::formed(CONFIG);
    let activity = Activity { step: 120, progress: 1, call: None, in_call: false, waits: false };
    job.say(2, 0, ControlMessage::Heartbeat(activity));
    let actions = job.step(CoordinatorEvent::Exited { rank: 2, exit: KILLED });
    assert_eq!(told(&actions, &ControlMessage::Regroup), [0, 1, 3]);
    assert!(text(&actions).starts_with("rank 2 on a was lost at step 120: it was killed by signal 9"), "{actions:?}");
    // What is left of the generation before has no effect.
    assert_eq!(job.say(1, 0, ControlMessage::Finish), []);
    assert_eq!(job.say(0, 1, ControlMessage::Ready { position: Some(120) }), []);
    assert_eq!(job.say(1, 1, ControlMessage::Ready { position: Some(121) }), []);
    let actions = job.say(3, 1, ControlMessage::Ready { position: Some(121) });
    // Those with the newest state are taken.
    assert_eq!(assigned(&actions), [(0, 0, 0), (1, 0, 2), (3, 1, 2)]);
    let actions = job.say(1, 1, ControlMessage::Resumed { step: 121 });
    let expected = Resumed { generation: 1, step: 121, workers: 2, spares: 1, first: 1, took_ms: 50 };
    assert!(actions.contains(&CoordinatorAction::Notice(Notice::Resumed(expected))), "{actions:?}");
    // The spare's state is old by now: alone it cannot go on.
    job.core.config.min = 1;
    job.step(CoordinatorEvent::Exited { rank: 1, exit: KILLED });
    job.step(CoordinatorEvent::Exited { rank: 3, exit: KILLED });
    let actions = job.say(0, 2, ControlMessage::Ready { position: Some(120) });
    assert_eq!(assigned(&actions), [(0, 0, 1)]);
    assert!(places(&actions)[0].state_lost, "it goes back to a checkpoint: {actions:?}");
}

/// With restarts left, a job whose workers are all lost is theirs again: from the newest checkpoint.
#[test]
fn a_job_that_lost_all_workers_waits_for_those_that_start_again() {
    let mut job = Job::formed(ElasticConfig { restarts: 8, ..CONFIG });
    let activity = Activity { step: 40, progress: 1, call: None, in_call: false, waits: false };
    job.say(0, 0, ControlMessage::Heartbeat(activity));
    for rank in 0..4 {
        let actions = job.step(CoordinatorEvent::Exited { rank, exit: KILLED });
        assert!(told_end(&actions).is_none(), "{actions:?}");
    }
    let mut started = Vec::new();
    for _ in 0..400 {
        let actions = job.step(CoordinatorEvent::Tick);
        started.extend(actions.iter().filter_map(|action| match action {
            CoordinatorAction::Start { rank } => Some(*rank),
            _ => None,
        }));
    }
    assert_eq!(started, [0, 1, 2, 3]);
    assert_eq!(assigned(&job.hello(10, 0, "1")), [], "two are needed");
    let actions = job.hello(11, 1, "1");
    assert_eq!(assigned(&actions), [(10, 0, 2), (11, 1, 2)]);
    for place in places(&actions) {
        assert!(place.state_lost && place.lost.lines().count() == 4, "{place:?}");
    }
    // Whoever is lost before all have it is added; then nobody is told of them again.
    job.step(CoordinatorEvent::Exited { rank: 1, exit: KILLED });
    job.hello(12, 2, "1");
    let actions = job.say(10, 2, ControlMessage::Ready { position: None });
    assert!(places(&actions).iter().all(|place| place.state_lost && place.lost.lines().count() == 5), "{actions:?}");
    job.say(10, 2, ControlMessage::Resumed { step: 20 });
    let actions = job.step(CoordinatorEvent::Exited { rank: 2, exit: KILLED });
    assert!(text(&actions).starts_with("rank 1 on a was lost at step 20"), "the job stands there again: {actions:?}");
    job.hello(13, 3, "1");
    let actions = job.say(10, 3, ControlMessage::Ready { position: Some(41) });
    assert_eq!(assigned(&actions), [(10, 0, 2), (13, 1, 2)]);
    let place = &places(&actions)[0];
    assert_eq!((place.state_lost, place.lost.lines().count(), place.resumed), (false, 1, 2));
}

/// Who is lost while all end after their step is lost like any other: the rest save the state.
#[test]
fn an_interrupted_job_goes_on_without_who_is_lost_until_it_has_ended() {
    let signals = |actions: &[CoordinatorAction]| {
        let look = |action: &CoordinatorAction| match action {
            CoordinatorAction::Signal { rank, signal: 2 } => Some(*rank),
            _ => None,
        };
        actions.iter().filter_map(look).collect::<Vec<_>>()
    };
    for before in [true, false] {
        // One worker that is left can save it, whatever the others were needed for.
        let mut job = Job::formed(ElasticConfig { min: 4, restarts: 4, ..CONFIG });
        let interrupt = CoordinatorEvent::Interrupt { signal: 2 };
        if before {
            assert_eq!(signals(&job.step(interrupt.clone())), [0, 1, 2, 3]);
        }
        for rank in 1..4 {
            let actions = job.step(CoordinatorEvent::Exited { rank, exit: KILLED });
            assert!(told_end(&actions).is_none(), "{actions:?}");
        }
        if !before {
            assert!(signals(&job.step(interrupt)).is_empty());
        }
        let actions = job.say(0, 1, ControlMessage::Ready { position: Some(9) });
        assert_eq!(assigned(&actions), [(0, 0, 1)]);
        // Ctrl-C that comes twice would end it at once.
        assert_eq!(signals(&actions), if before { vec![] } else { vec![0] });
        job.say(0, 1, ControlMessage::Resumed { step: 5 });
        let actions = job.say(0, 1, ControlMessage::Finish);
        assert_eq!(told(&actions, &ControlMessage::Release), [0]);
        let actions = job.step(CoordinatorEvent::Exited { rank: 0, exit: Exit::Code(0) });
        let ended =
            |action: &CoordinatorAction| matches!(action, CoordinatorAction::Ended(verdict) if verdict.exit_code == 0);
        assert!(actions.iter().any(ended), "{actions:?}");
    }
}

/// No signal of the launcher's reaches a worker that joined.
#[test]
fn a_joined_worker_is_told_that_the_job_is_to_end() {
    let mut job = Job::formed(ElasticConfig { min: 1, ..CONFIG });
    job.hello(50, ANY_RANK, "1");
    job.say(0, 0, ControlMessage::Yielded);
    for rank in 0..4 {
        job.step(CoordinatorEvent::Exited { rank, exit: KILLED });
    }
    let actions = job.say(50, 1, ControlMessage::Ready { position: Some(9) });
    assert_eq!(assigned(&actions), [(50, 0, 1)]);
    let actions = job.step(CoordinatorEvent::Interrupt { signal: 2 });
    assert_eq!(told(&actions, &ControlMessage::Interrupt), [50], "{actions:?}");
}

/// All results are there: whoever is stopped at its end is ended, and costs the job nothing.
#[test]
fn a_worker_that_is_stopped_at_its_end_is_not_waited_for() {
    let mut job = Job::formed(CONFIG);
    (0..4).for_each(|link| drop(job.say(link, 0, ControlMessage::Finish)));
    for rank in 0..3 {
        job.step(CoordinatorEvent::Exited { rank, exit: Exit::Code(0) });
    }
    job.step(CoordinatorEvent::Stopped { rank: 3 });
    let since_ms = job.now_ms;
    let kill = CoordinatorAction::Kill { rank: 3, link: Some(3) };
    while !job.step(CoordinatorEvent::Tick).contains(&kill) {
        assert!(job.now_ms < since_ms + 2 * CONFIG.deadlines.heartbeat_ms, "two heartbeats");
    }
    let actions = job.step(CoordinatorEvent::Exited { rank: 3, exit: KILLED });
    assert!(matches!(&actions[..], [CoordinatorAction::Ended(verdict)] if verdict.exit_code == 0), "{actions:?}");
}

/// The ranks hear of a spare that is lost beside them, and one that joined hears that the job goes on without it.
#[test]
fn the_loss_of_a_spare_is_told() {
    let mut job = Job::formed(CONFIG);
    job.hello(50, ANY_RANK, "1");
    let actions = job.step(CoordinatorEvent::Closed { link: 50 });
    let lost = "worker 4 on a was lost: it closed its control link";
    assert_eq!(told(&actions, &ControlMessage::Lost { text: lost.into() }), [0, 1, 2, 3], "{actions:?}");
    job.hello(51, ANY_RANK, "1");
    let actions = job.say(51, 0, ControlMessage::GiveUp { text: "it was asked to".into(), shown: false });
    let text = "the job goes on without this worker: it was asked to".into();
    assert_eq!(told(&actions, &ControlMessage::Abort { text }), [51], "{actions:?}");
}

/// Where each worker holds a part of the state, a spare hands its part over before it is one.
#[test]
fn a_shard_is_handed_over_before_its_holder_becomes_a_spare() {
    let mut job = Job::formed(ElasticConfig { sharded: true, ..CONFIG });
    job.step(CoordinatorEvent::Exited { rank: 2, exit: KILLED });
    let ready = |job: &mut Job, generation: u32, positions: [(usize, Option<u64>); 3]| {
        positions.map(|(link, position)| job.say(link, generation, ControlMessage::Ready { position }))
    };
    let keepers = |actions: &[CoordinatorAction]| {
        let look = |action: &CoordinatorAction| match action {
            CoordinatorAction::Send { envelope: Envelope { message: ControlMessage::Assign(place), .. }, .. } => {
                Some((place.keepers, place.lost.lines().count()))
            }
            _ => None,
        };
        actions.iter().filter_map(look).collect::<Vec<_>>()
    };
    let [.., last] = ready(&mut job, 1, [(0, Some(9)), (1, Some(9)), (3, Some(9))]);
    assert_eq!(assigned(&last), [(0, 0, 3), (1, 1, 3), (3, 2, 3)], "all who hold a part");
    assert_eq!(keepers(&last), [(2, 1); 3]);
    let handed_over_ms = job.now_ms;
    let actions = job.say(1, 1, ControlMessage::Yielded);
    assert_eq!(told(&actions, &ControlMessage::Regroup), [0, 1, 3]);
    let [.., last] = ready(&mut job, 2, [(0, Some(9)), (1, Some(9)), (3, None)]);
    assert_eq!(assigned(&last), [(0, 0, 2), (1, 1, 2), (3, 0, 0)]);
    assert_eq!(keepers(&last), [(0, 1); 3], "the loss is told again: this is the group that goes on");
    let actions = job.say(0, 2, ControlMessage::Resumed { step: 4 });
    let took = actions.iter().find_map(|action| match action {
        CoordinatorAction::Notice(Notice::Resumed(resumed)) => Some(resumed.took_ms),
        _ => None,
    });
    assert!(took.unwrap() > job.now_ms - handed_over_ms, "recovery began with the loss");
}

#[test]
fn too_few_end_the_job_and_say_so() {
    let mut job = Job::formed(ElasticConfig { min: 4, ..CONFIG });
    job.step(CoordinatorEvent::Exited { rank: 3, exit: KILLED });
    (0..2).for_each(|worker| drop(job.say(worker, 1, ControlMessage::Ready { position: Some(1) })));
    let text = text(&job.say(2, 1, ControlMessage::Ready { position: Some(1) }));
    let first = "only 3 workers are left, of which 2 can share 8 grains; the job needs at least 4 (--min 4)";
    assert_eq!(text.lines().next(), Some(first));
    assert!(text.contains("rank 3 on a was lost at step 0") && text.contains("--resume"), "{text}");
}

#[test]
fn who_joins_is_taken_in_after_a_step_if_that_makes_the_group_larger() {
    let mut job = Job::formed(CONFIG);
    // A fifth worker waits: eight grains cannot be shared by five.
    let actions = job.hello(50, ANY_RANK, "1");
    assert_eq!(actions, [CoordinatorAction::Notice(Notice::Spare { rank: 4, host: "a".into() })]);
    // One with another job is told so, and the job goes on.
    let actions = job.hello(51, ANY_RANK, "2");
    assert!(matches!(&actions[..], [CoordinatorAction::Send { link: 51, envelope: Envelope {
        message: ControlMessage::Abort { text }, .. } }] if text.contains("`job.seed` is `2` here, but `1` in the job")));
    for link in [52, 53] {
        assert!(told(&job.hello(link, ANY_RANK, "1"), &ControlMessage::Yield).is_empty());
    }
    let actions = job.hello(54, ANY_RANK, "1");
    assert_eq!(told(&actions, &ControlMessage::Yield), [0, 1, 2, 3]);
    let actions = job.say(0, 0, ControlMessage::Yielded);
    assert_eq!(told(&actions, &ControlMessage::Regroup).len(), 8);
    for worker in [0, 1, 2, 3] {
        job.say(worker, 1, ControlMessage::Ready { position: Some(3) });
    }
    let last = [50, 52, 53, 54].map(|link| job.say(link, 1, ControlMessage::Ready { position: None }));
    let worlds: Vec<usize> = assigned(&last[3]).iter().map(|place| place.2).collect();
    assert_eq!(worlds, [8; 8]);
}

#[test]
fn a_lost_worker_is_started_again_and_its_state_comes_from_the_others() {
    let mut job = Job::formed(ElasticConfig { restarts: 1, ..CONFIG });
    job.step(CoordinatorEvent::Exited { rank: 1, exit: KILLED });
    for worker in [0, 2, 3] {
        job.say(worker, 1, ControlMessage::Ready { position: Some(1) });
    }
    let starts = |actions: &[CoordinatorAction]| actions.contains(&CoordinatorAction::Start { rank: 1 });
    assert!(!starts(&job.step(CoordinatorEvent::Tick)));
    let beat = |job: &mut Job| {
        for worker in [0, 2, 3] {
            let activity = Activity { step: 1, progress: job.now_ms, call: None, in_call: false, waits: false };
            job.say(worker, 1, ControlMessage::Heartbeat(activity));
        }
        job.step(CoordinatorEvent::Tick)
    };
    assert!((0..40).any(|_| starts(&beat(&mut job))));
    let actions = job.hello(9, 1, "1");
    assert_eq!(told(&actions, &ControlMessage::Yield), [0, 2]);
    assert!(actions.contains(&CoordinatorAction::Notice(Notice::Spare { rank: 1, host: "a".into() })), "{actions:?}");
    job.say(0, 1, ControlMessage::Yielded);
    for link in [0, 2, 3] {
        job.say(link, 2, ControlMessage::Ready { position: Some(2) });
    }
    let actions = job.say(9, 2, ControlMessage::Ready { position: None });
    assert_eq!(assigned(&actions), [(0, 0, 4), (9, 1, 4), (2, 2, 4), (3, 3, 4)]);
}

/// Of one whose process nobody sees, the end of a link that this core closes tells nothing.
#[test]
fn a_silent_worker_is_awaited_until_it_must_have_given_up() {
    let mut job = Job::formed(ElasticConfig { supervised: false, ..CONFIG });
    let beat = |job: &mut Job, generation: u32| {
        job.now_ms += 100;
        for worker in [0, 1, 2] {
            let activity = Activity { step: 1, progress: job.now_ms, call: None, in_call: false, waits: false };
            job.say(worker, generation, ControlMessage::Heartbeat(activity));
        }
        job.step(CoordinatorEvent::Tick)
    };
    let closes = CoordinatorAction::Kill { rank: 3, link: Some(3) };
    assert!((0..40).any(|_| beat(&mut job, 0).contains(&closes)));
    let lost_ms = job.now_ms;
    let mut actions = job.core.step(lost_ms, CoordinatorEvent::Closed { link: 3 });
    for worker in [0, 1, 2] {
        actions.extend(job.say(worker, 1, ControlMessage::Ready { position: Some(3) }));
    }
    assert_eq!(assigned(&actions), [], "it may still be there");
    assert!((0..40).any(|_| !assigned(&beat(&mut job, 1)).is_empty()));
    assert!(job.now_ms >= lost_ms + CONFIG.deadlines.orphan_ms());
}

#[test]
fn a_failure_of_its_own_ends_the_job() {
    let mut job = Job::formed(CONFIG);
    let actions = job.say(1, 0, ControlMessage::Fail { text: "the loss is NaN".into(), culprit: None });
    assert!(text(&actions).contains("the loss is NaN"), "{actions:?}");
}

/// A job that runs for long may see any number of workers come and go.
#[test]
fn those_who_joined_and_left_are_forgotten() {
    let mut job = Job::formed(CONFIG);
    for round in 0..2 * WORKERS_MAX {
        let link = 100 + round;
        let actions = job.hello(link, ANY_RANK, "1");
        assert!(actions.contains(&CoordinatorAction::Notice(Notice::Spare { rank: 4 + round, host: "a".into() })));
        job.step(CoordinatorEvent::Closed { link });
        (0..4).for_each(|worker| {
            let activity = Activity { step: 1, progress: round as u64, call: None, in_call: false, waits: false };
            job.say(worker, 0, ControlMessage::Heartbeat(activity));
        });
        job.step(CoordinatorEvent::Tick);
    }
    let settled = job.now_ms + 10 * CONFIG.deadlines.heartbeat_ms;
    job.core.forget(settled);
    assert_eq!((job.core.workers.len(), job.core.links.len(), job.core.generation), (4, 4, 0));
}

/// Two workers on each of two hosts, which a launcher on neither started.
fn on_two_hosts(config: ElasticConfig) -> Job {
    let places = ["a", "a", "b", "b"].map(String::from);
    let mut job = Job { core: Elastic::new(config, &places, 0), now_ms: 0 };
    (0..4).for_each(|worker| drop(job.hello(worker, worker, "1")));
    job
}

/// What is done until this time, while all but those who left give signs of life and say whom they cannot reach.
fn pass(job: &mut Job, until_ms: u64, unreachable: &[(usize, &[usize])]) -> Actions {
    let mut actions = Vec::new();
    while job.now_ms < until_ms {
        for link in 0..4 {
            let activity = Activity { step: 7, progress: 1, call: None, in_call: true, waits: true };
            actions.extend(job.say(link, 0, ControlMessage::Heartbeat(activity)));
            if let Some((_, ranks)) = unreachable.iter().find(|(rank, _)| *rank == link) {
                actions.extend(job.say(link, 0, ControlMessage::Unreachable { ranks: ranks.to_vec() }));
            }
        }
        actions.extend(job.step(CoordinatorEvent::Tick));
    }
    actions
}

#[test]
fn hosts_behind_a_cut_are_lost_together_and_stay_away_until_somebody_joins_there() {
    let config = ElasticConfig { restarts: 8, ..CONFIG };
    let mut job = on_two_hosts(config);
    let cut: [(usize, &[usize]); 2] = [(1, &[2, 3]), (2, &[1])];
    let actions = pass(&mut job, 3000, &cut);
    assert_eq!(told(&actions, &ControlMessage::Regroup), [0, 1], "{actions:?}");
    let lost: Vec<String> = actions
        .iter()
        .filter_map(|action| match action {
            CoordinatorAction::Notice(Notice::Lost { text, .. }) => Some(text.clone()),
            _ => None,
        })
        .collect();
    let why = "on a was lost at step 7: the network between its host and a is cut; nothing is started there any more";
    assert_eq!(lost, [format!("rank 2 {why}"), format!("rank 3 {why}")]);
    for rank in [2, 3] {
        job.step(CoordinatorEvent::Exited { rank, exit: KILLED });
    }
    job.say(0, 1, ControlMessage::Ready { position: Some(15) });
    let actions = job.say(1, 1, ControlMessage::Ready { position: Some(15) });
    assert_eq!(assigned(&actions), [(0, 0, 2), (1, 1, 2)]);
    let starts = |actions: &[CoordinatorAction]| {
        actions.iter().filter(|action| matches!(action, CoordinatorAction::Start { .. })).count()
    };
    for _ in 0..50 {
        assert_eq!(starts(&job.step(CoordinatorEvent::Tick)), 0);
    }
    assert_eq!(job.core.cut_off.iter().collect::<Vec<_>>(), ["b"]);
    // By hand, from the host itself.
    job.hello(9, ANY_RANK, "1");
    assert!(job.core.cut_off.is_empty());
}

#[test]
fn a_cut_that_heals_in_time_or_a_stuck_rank_costs_nobody() {
    let mut job = on_two_hosts(CONFIG);
    assert_eq!(told(&pass(&mut job, 1500, &[(1, &[2])]), &ControlMessage::Regroup), NOBODY);
    assert_eq!(told(&pass(&mut job, 6000, &[(1, &[])]), &ControlMessage::Regroup), NOBODY);
    // Of one host, or of no rank at all.
    assert_eq!(told(&pass(&mut job, 9000, &[(1, &[0, 4000])]), &ControlMessage::Regroup), NOBODY);
    // What is said of a generation that is over has no effect.
    job.step(CoordinatorEvent::Exited { rank: 3, exit: KILLED });
    assert_eq!(told(&pass(&mut job, 12_000, &[(1, &[2])]), &ControlMessage::Regroup), NOBODY);
}

/// The last rank of the smaller side may be needed: then the job ends, and says who was cut off.
#[test]
fn a_cut_that_leaves_too_few_ends_the_job() {
    let mut job = on_two_hosts(ElasticConfig { min: 4, ..CONFIG });
    pass(&mut job, 3000, &[(0, &[2, 3])]);
    for rank in [2, 3] {
        job.step(CoordinatorEvent::Exited { rank, exit: KILLED });
    }
    job.say(0, 1, ControlMessage::Ready { position: Some(15) });
    let actions = job.say(1, 1, ControlMessage::Ready { position: Some(15) });
    let text = text(&actions);
    assert!(text.starts_with("only 2 workers are left; the job needs at least 4"), "{text}");
    assert!(text.contains("rank 3 on a was lost at step 7: the network between its host and a is cut"), "{text}");
}
