use super::*;
use kolo_comm::{Watch, thread};
use serde_json::Value;

fn read(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let document: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    document["traceEvents"].as_array().unwrap().clone()
}

fn spans(events: &[Value]) -> Vec<(&str, f64, f64)> {
    let span = |e: &'_ Value| e["ph"] == "X";
    let read = |e| -> (&str, f64, f64) {
        let e: &Value = e;
        (e["name"].as_str().unwrap(), e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap())
    };
    events.iter().filter(|e| span(e)).map(read).collect()
}

#[test]
fn neighbours_of_one_name_become_one_event() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    let timeline = Timeline::create(&path, StepRange::ALL).unwrap();
    let at = |us: u64| timeline.origin + Duration::from_micros(us);
    timeline.add(0, "forward", at(0), at(10), 0);
    timeline.add(1, "forward", at(0), at(10), 0);
    timeline.add(0, "forward", at(11), at(30), 0);
    timeline.add(0, "backward", at(30), at(40), 0);
    timeline.add(COMMUNICATION, "bucket 0", at(35), at(50), 64);
    timeline.finish(None).unwrap();
    let events = read(&path);
    let mut all = spans(&events);
    all.sort_by(|one, other| (one.1, one.2).partial_cmp(&(other.1, other.2)).unwrap());
    assert_eq!(
        all,
        [("forward", 0.0, 10.0), ("forward", 0.0, 30.0), ("backward", 30.0, 10.0), ("bucket 0", 35.0, 15.0)]
    );
    let names: Vec<&str> = events.iter().filter_map(|e| e["args"]["name"].as_str()).collect();
    assert_eq!(names, ["rank 0", "compute 0", "compute 1", "communication"]);
}

/// Whatever the number of events, few are in memory, and the file is whole at any time.
#[test]
fn a_long_run_holds_few_events_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    let timeline = Timeline::create(&path, StepRange::ALL).unwrap();
    for step in 0..200 {
        timeline.begin_step(step).unwrap();
        for call in 0..100u64 {
            let start = timeline.origin + Duration::from_millis(1 + 100 * step as u64 + call);
            let lane = [0, 1, COMMUNICATION][call as usize % 3];
            timeline.add(lane, &format!("layer \"{call}\""), start, start + Duration::from_micros(500), 1);
        }
        // A lane's name and an event may come at once, and each lane has one event that is not over.
        assert!(timeline.buffered() <= BUFFERED_EVENTS_MAX + 5, "{} events", timeline.buffered());
        if step == 150 {
            assert!(spans(&read(&path)).len() > 100 * 100);
        }
    }
    drop(timeline);
    assert_eq!(spans(&read(&path)).len(), 200 * 100);
}

#[test]
fn steps_out_of_the_range_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    let timeline = Timeline::create(&path, "3..5".parse().unwrap()).unwrap();
    for step in 0..9 {
        timeline.begin_step(step).unwrap();
        let start = timeline.origin + Duration::from_millis(step as u64);
        timeline.add(0, &format!("step {step}"), start, start, 0);
    }
    timeline.finish(None).unwrap();
    let events = read(&path);
    let steps: Vec<u64> = events.iter().filter_map(|e| e["args"]["step"].as_u64()).collect();
    assert_eq!(steps, [3, 4]);
    assert_eq!(spans(&events).iter().map(|span| span.0).collect::<Vec<_>>(), ["step 3", "step 4"]);
}

#[test]
fn ranges_are_half_open() {
    let range = |text: &str| text.parse::<StepRange>();
    let whole = |text: &str| range(text).map(|range| (range.first(), range.end()));
    assert_eq!(whole("100..120"), Ok((100, 120)));
    assert_eq!(whole("100.."), Ok((100, usize::MAX)));
    assert_eq!(whole("..20"), Ok((0, 20)));
    assert_eq!(range(".."), Ok(StepRange::ALL));
    for wrong in ["", "7", "9..9", "9..3", "a..b", "-1..2", "1...3", "1..=3"] {
        assert!(range(wrong).is_err(), "{wrong}");
    }
}

/// The parts of all ranks arrive whole, however large they are.
#[test]
fn ranks_join_their_parts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    let watches: Vec<Arc<Watch>> = (0..3).map(|_| Watch::alone()).collect();
    let count = |rank: usize| if rank == 2 { 3 * CHUNK_BYTES / 200 } else { 5 };
    std::thread::scope(|scope| {
        for (transport, watch) in thread::world(&watches).into_iter().zip(&watches) {
            let (world, path) = (Communicator::new(transport, Arc::clone(watch), true), &path);
            scope.spawn(move || {
                let timeline = Timeline::among(path, StepRange::ALL, &world).unwrap();
                for at in 0..count(world.rank()) {
                    let start = Instant::now();
                    timeline.add(at % 2, &format!("call {at} of a rank"), start, start, 8);
                }
                timeline.finish(Some(&world)).unwrap();
            });
        }
    });
    let events = read(&path);
    for rank in 0..3 {
        let of_rank = events.iter().filter(|e| e["pid"] == rank && e["ph"] == "X").count();
        assert_eq!(of_rank, count(rank), "rank {rank}");
    }
    // Parts have no names.
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_named() {
    let timeline = Timeline::create(Path::new("/dev/full"), StepRange::ALL);
    let message = timeline.err().unwrap().to_string();
    assert!(message.starts_with("/dev/full: No space left on device"), "{message}");
}
