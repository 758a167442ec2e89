//! All deadlines, from one number.

use kolo_comm::watch::STALL_HEARTBEATS;

/// Every deadline is a fraction or a multiple of the heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadlines {
    pub heartbeat_ms: u64,
}

impl Deadlines {
    /// How often a member sends a heartbeat.
    pub fn beat_ms(self) -> u64 {
        (self.heartbeat_ms / 4).max(1)
    }

    /// How often the coordinator checks.
    pub fn tick_ms(self) -> u64 {
        (self.heartbeat_ms / 50).max(1)
    }

    /// HeartbeatTimeout after which a rank counts as stopped.
    pub fn silence_ms(self) -> u64 {
        self.heartbeat_ms * 3 / 2
    }

    /// How long a rank's process may be stopped. It is seen at once, and whoever does it has a reason: no doubt needs time.
    pub fn stopped_ms(self) -> u64 {
        self.heartbeat_ms
    }

    /// HeartbeatTimeout of the coordinator after which a member gives up.
    pub fn orphan_ms(self) -> u64 {
        self.heartbeat_ms * 2
    }

    /// Silence of a coordinator whose host still answers, after which a member gives up: its process is suspended, or its
    /// machine is overloaded, and either may end.
    pub fn suspended_ms(self) -> u64 {
        self.stall_ms()
    }

    /// Between the first word of a rank that others do not answer and that of all who cannot reach each other: some of their
    /// streams are idle, and are probed only now and then.
    pub fn reach_ms(self) -> u64 {
        let probed = kolo_comm::reach::probe_pause(std::time::Duration::from_millis(self.heartbeat_ms));
        probed.as_millis() as u64 + self.heartbeat_ms
    }

    /// Time for stronger evidence to come.
    pub fn settle_ms(self) -> u64 {
        (self.heartbeat_ms / 20).max(1)
    }

    /// Time for the end of a process whose link is closed to be seen; on a crowded host it may take a while.
    pub fn exit_ms(self) -> u64 {
        (self.heartbeat_ms / 4).max(1)
    }

    /// Between being told to end and being killed.
    pub fn grace_ms(self) -> u64 {
        (self.heartbeat_ms / 5).max(1)
    }

    pub fn stall_ms(self) -> u64 {
        self.heartbeat_ms * u64::from(STALL_HEARTBEATS)
    }
}
