//! The coordinator of a job that somebody else started: a thread in rank 0, which knows of the others by their links alone.

use crate::control_link::ControlLink;
use crate::coordinator::{CoordinatorConfig, Notice};
use crate::deadlines::Deadlines;
use crate::driver::{Driver, ProcessControl, ProcessEvent};
use crate::elastic::ElasticOptions;
use crate::ending_mark::EndingMark;
use crate::join::NoticeObserver;
use crate::listener::Listener;
use crate::startup_watch::AnnouncedRanks;
use kolo_comm::Fault;
use std::cell::Cell;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The coordinator's thread in rank 0.
#[derive(Debug)]
pub(crate) struct CoordinatorThread {
    thread: JoinHandle<()>,
    ending: Arc<AtomicBool>,
    deadlines: Deadlines,
    /// Where the others find this process, until all have.
    file: Option<PathBuf>,
}

/// What ranks that meet through files have of them.
#[derive(Debug, Default)]
pub(crate) struct MeetingFiles {
    /// Where the others find this process, until all have.
    pub credentials: Option<PathBuf>,
    pub mark: Option<EndingMark>,
    /// Those who have not come yet.
    pub announced: Option<AnnouncedRanks>,
}

/// Without processes to watch, links are all there is, and before they stand what ranks announce.
struct LinksOnly {
    announced: Option<AnnouncedRanks>,
}

impl LinksOnly {
    fn look_no_more(&mut self) {
        self.announced.take().iter().for_each(AnnouncedRanks::sweep);
    }
}

impl ProcessControl for LinksOnly {
    fn events(&mut self) -> Vec<(usize, ProcessEvent)> {
        let Some((rank, why)) = self.announced.as_mut().and_then(AnnouncedRanks::lost) else { return Vec::new() };
        self.look_no_more();
        vec![(rank, ProcessEvent::Trouble(why))]
    }

    fn signal(&mut self, _: usize, _: i32) {}

    fn kill(&mut self, _: usize) -> bool {
        false
    }

    fn interests(&self, _: &mut Vec<(RawFd, i16)>) {}
}

impl CoordinatorThread {
    pub fn start(
        config: CoordinatorConfig,
        listener: Listener,
        own: ControlLink,
        observer: NoticeObserver,
        files: MeetingFiles,
        elastic: Option<ElasticOptions>,
    ) -> Result<Self, Fault> {
        let ending = Arc::new(AtomicBool::new(false));
        let MeetingFiles { credentials: file, mark, announced } = files;
        let (flag, left) = (Arc::clone(&ending), file.clone());
        let serve = move || {
            let joined = Cell::new(false);
            let mut observe = |notice: &Notice| {
                joined.set(joined.get() || matches!(notice, Notice::Joined { .. } | Notice::Resumed(_)));
                if matches!(notice, Notice::Joined { .. }) {
                    // Who comes after a job that ended before it began still finds its way here, and is told why.
                    let _ = file.as_ref().map(std::fs::remove_file);
                }
                observer(notice);
                if matches!(notice, Notice::Ending { .. }) {
                    flag.store(true, Ordering::Release);
                }
            };
            let (links, listener) = (vec![own], Some(listener));
            // An elastic job has its own way with those who do not come.
            let processes = LinksOnly { announced: announced.filter(|_| elastic.is_none()) };
            let mut driver = match elastic {
                None => Driver::new(config, links, listener, processes, &mut observe),
                Some(elastic) => {
                    let hosts = vec![String::new(); config.world];
                    let core = Box::new(elastic.core(config.job, config.deadlines, &hosts, false));
                    Driver::with_core(core, (config.deadlines, false), links, listener, processes, &mut observe)
                }
            };
            let heartbeat = Duration::from_millis(config.deadlines.heartbeat_ms);
            let mut looked = Instant::now();
            while driver.run_once([]).is_none() {
                if joined.get() {
                    driver.processes.look_no_more();
                }
                if joined.get() || looked.elapsed() < heartbeat {
                    continue;
                }
                looked = Instant::now();
                // This process was suspended, and the others did not wait for it.
                if let Some(text) = mark.as_ref().and_then(EndingMark::said) {
                    driver.give_up(text);
                    joined.set(true);
                }
            }
        };
        let thread = std::thread::Builder::new().name("coordinator".into()).spawn(serve);
        let thread = thread.map_err(|error| Fault::thread("starting the coordinator", &error))?;
        Ok(Self { thread, ending, deadlines: config.deadlines, file: left })
    }

    /// Waits a moment until the end of the job was told to all.
    pub fn await_ending(&self) {
        let deadline = Instant::now() + Duration::from_millis(self.deadlines.settle_ms() + self.deadlines.grace_ms());
        while !self.ending.load(Ordering::Acquire) && !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for CoordinatorThread {
    /// The others hear the end of the job from this thread: it may take them a moment to leave.
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_millis(self.deadlines.orphan_ms());
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = self.file.as_ref().map(std::fs::remove_file);
    }
}
