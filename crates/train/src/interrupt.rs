//! Ctrl-C: a run is asked to stop, finishes its step and reports; a second Ctrl-C leaves at once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// What a shell reports for a process ended by Ctrl-C: 128 + SIGINT.
const EXIT_INTERRUPTED: i32 = 130;

/// A flag that every part of a run may look at. Clones share it. The default one hears no signal.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    flag: Arc<AtomicBool>,
}

impl Interrupt {
    /// Sets the flag by hand.
    pub fn request(&self) {
        self.flag.store(true, Ordering::Relaxed);
    }

    /// Whether the run should stop at the next step.
    pub fn requested(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
    }
}

/// Listens to SIGINT and SIGTERM. Call once per process.
pub fn install() -> io::Result<Interrupt> {
    let interrupt = Interrupt::default();
    // Actions run in the order of registration: the first signal finds the flag unset, then sets it. Only SIGINT
    // leaves at once, because a scheduler and a launcher may both pass on the same SIGTERM.
    flag::register_conditional_shutdown(SIGINT, EXIT_INTERRUPTED, Arc::clone(&interrupt.flag))?;
    flag::register(SIGINT, Arc::clone(&interrupt.flag))?;
    flag::register(SIGTERM, Arc::clone(&interrupt.flag))?;
    Ok(interrupt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::low_level::raise;
    use std::process::Command;

    #[test]
    fn clones_share_the_flag() {
        let interrupt = Interrupt::default();
        let clone = interrupt.clone();
        assert!(!clone.requested());
        interrupt.request();
        assert!(clone.requested());
    }

    /// Runs in a process of its own, started by the test below.
    #[test]
    #[ignore = "ends the process"]
    fn raise_signals() {
        let interrupt = install().unwrap();
        assert!(!interrupt.requested());
        raise(SIGINT).unwrap();
        assert!(interrupt.requested());
        raise(SIGTERM).unwrap();
        eprintln!("still here");
        raise(SIGINT).unwrap();
    }

    #[test]
    fn the_first_signal_asks_and_the_next_interrupt_leaves() {
        let path = module_path!().split_once("::").unwrap().1;
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("{path}::raise_signals"), "--ignored", "--nocapture"])
            .output()
            .unwrap();
        assert!(String::from_utf8_lossy(&output.stderr).contains("still here"));
        assert_eq!(output.status.code(), Some(EXIT_INTERRUPTED));
    }
}
