//! The lane's watch over exchanges, on devices whose exchanges end when the test says so.

use super::*;
use kolo_comm::thread;
use kolo_exec::ExchangeKind;
use kolo_graph::DType;

/// Devices that all share what happens to their exchanges.
#[derive(Debug, Default)]
struct Fate {
    done: AtomicBool,
    broken: AtomicBool,
    aborted: AtomicBool,
    ordered: AtomicBool,
}

#[derive(Debug)]
struct TestLinks(u8, Arc<Fate>);

#[derive(Debug)]
struct TestGroup(Arc<Fate>);

impl DeviceLinks for TestLinks {
    fn transport(&self) -> &'static str {
        "test"
    }
    fn identity(&self) -> Result<Vec<u8>, ExchangeError> {
        Ok(vec![self.0])
    }
    fn invite(&self) -> Result<Vec<u8>, ExchangeError> {
        Ok(vec![7, 0, 255])
    }
    fn join(&self, invitation: &[u8], place: GroupPlace, look: Look) -> Result<Box<dyn DeviceGroup>, ExchangeError> {
        assert_eq!((invitation, place), (&[7, 0, 255][..], GroupPlace { rank: self.0.into(), size: 2 }));
        look()?;
        Ok(Box::new(TestGroup(Arc::clone(&self.1))))
    }
}

impl DeviceGroup for TestGroup {
    fn prepare(&self, _: &Exchange, reproducible: bool) -> Result<usize, ExchangeError> {
        assert!(reproducible);
        Ok(0)
    }
    fn start(&self, _: usize) -> Result<(), ExchangeError> {
        Ok(())
    }
    fn order(&self, _: usize) -> Result<(), ExchangeError> {
        self.0.ordered.store(true, Ordering::Relaxed);
        Ok(())
    }
    fn is_done(&self, _: usize) -> Result<bool, ExchangeError> {
        match self.0.broken.load(Ordering::Relaxed) {
            true => Err("the network is gone".into()),
            false => Ok(self.0.done.load(Ordering::Relaxed)),
        }
    }
    fn abort(&self) {
        self.0.aborted.store(true, Ordering::Relaxed);
    }
}

fn sum_of(elements: usize, data: &mut [f32]) -> Exchange {
    Exchange {
        kind: ExchangeKind::AllReduce,
        name: "gradients".into(),
        axis: "data".into(),
        lane: None,
        dtype: DType::F32,
        input: data.as_mut_ptr().cast(),
        output: data.as_mut_ptr().cast(),
        elements,
        parts: Vec::new(),
        of_gradients: true,
    }
}

/// Two ranks start an exchange; `body` sees what becomes of it.
fn on_two(heartbeat_ms: u64, body: impl Fn(&dyn Collectives, &Arc<Watch>, &Fate) + Sync) {
    let watches: Vec<_> = (0..2).map(|_| Watch::new(Vec::new(), Duration::from_millis(heartbeat_ms))).collect();
    std::thread::scope(|scope| {
        for (transport, watch) in thread::world(&watches).into_iter().zip(&watches) {
            let body = &body;
            scope.spawn(move || {
                let world = Arc::new(Communicator::new(transport, Arc::clone(watch), true));
                let fate = Arc::new(Fate::default());
                let links: FoundLinks = Ok(Arc::new(TestLinks(world.rank() as u8, Arc::clone(&fate))));
                let mesh = Mesh::data(2, world.rank()).unwrap();
                let lane = lane(&mesh, &world, Some((LinkPreference::Always, links))).unwrap();
                assert!(lane.on_device(true).unwrap());
                let mut data = [1.0; 8];
                let number = lane.prepare(vec![sum_of(8, &mut data)], 1).unwrap();
                lane.start(number);
                lane.wait(number).unwrap();
                assert!(fate.ordered.load(Ordering::Relaxed), "the device waits for it");
                assert_eq!(lane.sent_bytes()["data"], 32);
                body(&*lane, watch, &fate);
                // Others end at the same time.
                let _ = world.barrier();
            });
        }
    });
}

#[test]
fn a_step_ends_when_its_exchanges_are_done() {
    on_two(1000, |lane, watch, fate| {
        std::thread::sleep(Duration::from_millis(20));
        assert!(watch.activity().waits, "whoever waits for others says so");
        std::thread::scope(|scope| {
            let settled = scope.spawn(|| lane.settle());
            std::thread::sleep(Duration::from_millis(20));
            assert!(!settled.is_finished());
            fate.done.store(true, Ordering::Relaxed);
            settled.join().unwrap().unwrap();
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(!watch.activity().waits);
        assert!(!fate.aborted.load(Ordering::Relaxed));
    });
}

#[test]
fn a_lost_rank_breaks_off_what_waits_on_the_device() {
    on_two(1000, |lane, watch, fate| {
        let lost = Fault::Lost { peer: 1, host: "node7".into(), during: "step 3".into(), why: "it was killed".into() };
        watch.abort(lost.clone());
        let error = lane.settle().unwrap_err();
        assert_eq!(error.downcast_ref::<Fault>(), Some(&lost));
        assert!(fate.aborted.load(Ordering::Relaxed), "nothing waits on the device any more");
        assert_eq!(lane.wait(0).unwrap_err().downcast_ref::<Fault>(), Some(&lost));
    });
}

#[test]
fn an_error_of_the_library_ends_exchanges() {
    on_two(20, |lane, _, fate| {
        fate.broken.store(true, Ordering::Relaxed);
        let error = lane.settle().unwrap_err().to_string();
        assert!(error.contains("the network is gone"), "{error}");
        assert!(fate.aborted.load(Ordering::Relaxed));
    });
}

#[test]
fn an_exchange_that_nobody_gets_on_with_is_a_stall() {
    on_two(5, |lane, _, fate| {
        let error = lane.settle().unwrap_err().to_string();
        assert!(error.starts_with("the exchange `gradients` did not finish within"), "{error}");
        assert!(fate.aborted.load(Ordering::Relaxed));
    });
}
