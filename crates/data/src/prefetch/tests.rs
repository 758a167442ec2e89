//! Every number of threads and batches gives the same samples; errors come at their step; nothing is left behind.

use super::*;
use crate::{Column, Field};

/// Sample `s` is (s, s + 0.5). It fails or panics where it is told to, and takes its time.
#[derive(Debug, Default)]
struct Count {
    fields: Vec<Field>,
    fails_from: Option<usize>,
    panics_at: Option<usize>,
    slow: bool,
    filled: AtomicUsize,
}

impl Source for Count {
    fn fields(&self) -> &[Field] {
        &self.fields
    }

    fn len(&self) -> usize {
        1_000_000
    }

    fn fill(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        self.filled.fetch_add(1, Ordering::Relaxed);
        if self.slow && sample.is_multiple_of(3) {
            std::thread::sleep(Duration::from_micros(300));
        }
        assert_ne!(Some(sample), self.panics_at, "the source is broken");
        if self.fails_from.is_some_and(|from| sample >= from) {
            return Err(ReadError::new("there is no more", "write more").at(sample as u64));
        }
        match field {
            0 => out.indices().fill(sample as i32),
            _ => out.reals().fill(sample as f32 + 0.5),
        }
        Ok(())
    }

    fn describe(&self) -> String {
        "count".into()
    }
}

/// Three grains of two samples; the second of the columns comes first.
#[derive(Debug)]
struct Order(Count);

impl Recipe for Order {
    fn source_name(&self) -> &str {
        "count"
    }

    fn source(&self) -> &dyn Source {
        &self.0
    }

    fn columns(&self) -> &[usize] {
        &[1, 0]
    }

    fn epoch(&self, _: usize) -> Option<usize> {
        None
    }

    fn choose(&self, step: usize, grain: usize, samples: &mut Vec<usize>) {
        samples.extend([0, 1].map(|at| step * 6 + grain * 2 + at));
    }
}

fn order(source: Count) -> Arc<Order> {
    let fields = vec![Field::index("x", &[2], 1 << 20), Field::real("y", &[])];
    Arc::new(Order(Count { fields, ..source }))
}

fn start(order: &Arc<Order>, batches: usize, threads: usize) -> Prefetch {
    let plan = PrefetchPlan { first: 2, end: 40, grains: 3, samples: 2, batches, threads };
    Prefetch::start(Arc::clone(order) as Arc<dyn Recipe>, plan, None)
}

fn take(prefetch: &mut Prefetch, step: usize) -> Result<Vec<f64>, ReadError> {
    prefetch.take(step, &mut |_| Ok::<(), ReadError>(()))?;
    let mut all = Vec::new();
    for grain in 0..3 {
        let samples = prefetch.grain(step, grain);
        let (Values::F32(y), Values::I32(x)) = (samples.values(0), samples.values(1)) else { panic!("types") };
        all.extend(y.iter().map(|y| f64::from(*y)));
        all.extend(x.iter().map(|x| f64::from(*x)));
    }
    Ok(all)
}

#[test]
fn threads_and_batches_do_not_matter() {
    let walk = |batches, threads, slow| {
        let mut prefetch = start(&order(Count { slow, ..Count::default() }), batches, threads);
        (2..40).flat_map(|step| take(&mut prefetch, step).unwrap()).collect::<Vec<f64>>()
    };
    let plain = walk(0, 0, false);
    assert_eq!(plain[..6], [12.5, 13.5, 12.0, 12.0, 13.0, 13.0]);
    for (batches, threads) in [(1, 1), (1, 3), (2, 2), (4, 1), (4, 5), (2, 0)] {
        assert!(plain == walk(batches, threads, true), "{batches} batches, {threads} threads");
    }
}

#[test]
fn a_step_may_be_taken_again_and_later_ones_may_be_made() {
    let mut prefetch = start(&order(Count::default()), 1, 1);
    assert_eq!(take(&mut prefetch, 2), take(&mut prefetch, 2));
    assert!(prefetch.can_take(3) && !prefetch.can_take(1) && !prefetch.can_take(4));
    // Beyond the end nothing is made ahead, but what is asked for is there.
    for step in 3..44 {
        assert_eq!(take(&mut prefetch, step).unwrap()[2], 6.0 * step as f64);
    }
}

#[test]
fn no_more_is_made_than_asked_for() {
    let order = order(Count::default());
    let mut prefetch = start(&order, 2, 3);
    take(&mut prefetch, 2).unwrap();
    let ready = |grains: usize| {
        while order.0.filled.load(Ordering::Relaxed) < grains * 4 {
            std::thread::yield_now();
        }
    };
    ready(9);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(order.0.filled.load(Ordering::Relaxed), 9 * 4, "one batch in use, two ready");
    take(&mut prefetch, 3).unwrap();
    ready(12);
}

#[test]
fn an_error_comes_at_its_step_and_is_the_first() {
    for (batches, threads) in [(0, 0), (1, 1), (4, 3)] {
        let mut prefetch =
            start(&order(Count { fails_from: Some(33), slow: true, ..Count::default() }), batches, threads);
        for step in 2..5 {
            take(&mut prefetch, step).unwrap();
        }
        let error = take(&mut prefetch, 5).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot read sample 33 of \"count\": byte 33: there is no more\n  hint: write more",
            "{batches} batches, {threads} threads"
        );
        assert_eq!(take(&mut prefetch, 5), Err(error), "again");
    }
}

#[test]
fn a_panic_comes_at_its_step() {
    for threads in [0, 2] {
        let mut prefetch = start(&order(Count { panics_at: Some(27), ..Count::default() }), 2, threads);
        take(&mut prefetch, 2).unwrap();
        take(&mut prefetch, 3).unwrap();
        let payload = catch_unwind(AssertUnwindSafe(|| take(&mut prefetch, 4))).unwrap_err();
        let text = payload.downcast_ref::<String>().unwrap();
        assert!(text.contains("the source is broken"), "{text}");
    }
}

/// A step that waits can be told to stop; then, and whenever it is dropped, every thread ends.
#[test]
fn nothing_is_left_behind() {
    let order = order(Count { slow: true, ..Count::default() });
    let mut prefetch = start(&order, 4, 3);
    assert_eq!(prefetch.threads(), 3);
    let mut looks = 0;
    let mut stop = |_| {
        looks += 1;
        if looks > 1 { Err(ReadError::new("enough", "")) } else { Ok(()) }
    };
    let stopped = (2..40).find_map(|step| prefetch.take(step, &mut stop).err());
    assert!(stopped.is_none_or(|error| error.message == "enough"));
    drop(prefetch);
    assert_eq!(Arc::strong_count(&order), 1, "a thread still holds it");
    drop(start(&order, 1, 1));
    assert_eq!(Arc::strong_count(&order), 1);
}

#[test]
fn every_grain_is_traced() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&seen);
    let tracer: Tracer = Arc::new(move |thread, step, start, end| {
        assert!(thread < 2 && start <= end);
        lock(&sink).push(step);
    });
    let plan = PrefetchPlan { first: 0, end: 4, grains: 3, samples: 2, batches: 2, threads: 2 };
    let mut prefetch = Prefetch::start(order(Count::default()), plan, Some(tracer));
    for step in 0..4 {
        prefetch.take(step, &mut |_| Ok::<(), ReadError>(())).unwrap();
    }
    drop(prefetch);
    let mut steps = lock(&seen).clone();
    steps.sort_unstable();
    assert_eq!(steps, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]);
}
