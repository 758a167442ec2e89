//! What simulated ranks do, as data: the acts of each role in their order, and the exchanges that they start.
//!
//! A *unit* is a rank, or ranks that do the same at the same time: those that share every layer. Units that differ only in
//! their grains have one script and are *replicas* of each other. Where all replicas are alike, one stands for all.

/// One thing that a unit does. A unit does one at a time, in the order of its script.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Act {
    /// Computes for so long, under a name of [`Scenario::names`].
    Compute { seconds: f64, name: u32 },
    /// Hands an exchange of [`Scenario::exchanges`] to its lane, and goes on. Whoever waits for it knows it by its handle.
    Start { exchange: u32, handle: u32 },
    /// Waits until the exchange that was last started with this handle is done.
    Wait { handle: u32 },
    /// Hands a message to its lane, and goes on.
    Send { message: u32, exchange: u32 },
    /// Waits until a message is there.
    Receive { message: u32 },
}

/// Who takes part in an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// The ranks of a unit, which are ready at the same time.
    Unit,
    /// The replicas of a unit.
    Replicas,
    /// All units of a replica that have its lane.
    Stages,
}

/// A collective or a message, as it costs if it has its links for itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExchangeCost {
    /// The lane that runs it: exchanges of a lane run one after the other, in the order in which they were started.
    pub lane: u32,
    pub scope: Scope,
    pub name: u32,
    /// Seconds before the first byte arrives, which take no bandwidth.
    pub latency: f64,
    /// Seconds of the bytes.
    pub transfer: f64,
    /// The level of the network whose link they fill: exchanges of a unit on one level share it.
    pub level: u32,
    pub bytes: u64,
}

/// What the units of one role do in a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Script {
    pub acts: Vec<Act>,
    /// How many handles its exchanges have.
    pub handles: u32,
}

/// A step of a whole cluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scenario {
    /// One for each role. Unit `replica * scripts + role` runs that of its role.
    pub scripts: Vec<Script>,
    /// Kinds of replicas that are simulated, each standing for at least one.
    pub replicas: Vec<Replica>,
    /// Ranks of each unit.
    pub ranks_per_unit: usize,
    pub exchanges: Vec<ExchangeCost>,
    /// Names of lanes, such as the axes of the mesh.
    pub lanes: Vec<String>,
    pub names: Vec<String>,
    /// Messages of a replica.
    pub messages: u32,
    pub levels: u32,
}

/// Replicas that one simulated replica stands for.
#[derive(Clone, Debug, PartialEq)]
pub struct Replica {
    pub count: usize,
    /// How many times as long each role computes; 1 for all if empty.
    pub slowness: Vec<f64>,
}

impl Replica {
    /// So many replicas without a slow rank.
    pub fn alike(count: usize) -> Self {
        Self { count, slowness: Vec::new() }
    }
}

impl Scenario {
    pub fn units(&self) -> usize {
        self.scripts.len() * self.replicas.len()
    }

    /// The number of a name, which is added if it is new.
    pub fn name(&mut self, text: &str) -> u32 {
        let known = self.names.iter().rposition(|name| name == text);
        known.unwrap_or_else(|| {
            self.names.push(text.into());
            self.names.len() - 1
        }) as u32
    }

    /// The number of a lane, which is added if it is new.
    pub fn lane(&mut self, text: &str) -> u32 {
        let known = self.lanes.iter().position(|name| name == text);
        known.unwrap_or_else(|| {
            self.lanes.push(text.into());
            self.lanes.len() - 1
        }) as u32
    }

    /// The number of an exchange with this cost, which is added if it is new.
    pub fn exchange(&mut self, cost: ExchangeCost) -> u32 {
        let known = self.exchanges.iter().position(|known| *known == cost);
        known.unwrap_or_else(|| {
            self.exchanges.push(cost);
            self.exchanges.len() - 1
        }) as u32
    }
}
