//! What a simulated worker has trained: how far, who made each step, and a digest of everything that went into it.
//!
//! A step is the sum of what every grain adds to it, and a grain adds a function of the state before, of the step and of its
//! number. So the same step from the same state has the same bits whoever makes it, as the real one does, and with however
//! many ranks; a step without some of the grains, with one of them twice or from another state has others.

use std::ops::Range;

/// A generation of a run of the job; those of a run that resumes it come after all of the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    pub run: u32,
    pub generation: u32,
}

impl Group {
    /// All later groups of its run.
    pub fn later(self) -> Range<Self> {
        Self { generation: self.generation + 1, ..self }..Self { run: self.run + 1, generation: 0 }
    }

    /// A number that no other group has, in the same order.
    pub fn number(self) -> u32 {
        (self.run << 16) | self.generation
    }

    fn of_number(number: u32) -> Self {
        Self { run: number >> 16, generation: number & 0xffff }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The group that made each step.
    pub makers: Vec<Group>,
    pub digest: u64,
}

fn mix(a: u64, b: u64) -> u64 {
    let mixed = (a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb) ^ (mixed >> 32)
}

/// Numbers beside the groups: the step, and the digest in two.
const HEAD: usize = 3;

impl State {
    pub fn step(&self) -> u64 {
        self.makers.len() as u64
    }

    /// What these grains add to the next step.
    pub fn contribution(&self, grains: Range<usize>) -> u64 {
        let before = mix(self.digest, self.step());
        grains.fold(0, |sum, grain| sum.wrapping_add(mix(before, grain as u64 + 1)))
    }

    /// The step whose sum this is, made by this group.
    pub fn advance(&mut self, maker: Group, sum: u64) {
        self.digest = mix(self.digest, sum);
        self.makers.push(maker);
    }

    /// Whether `later` was made from this one.
    pub fn is_before(&self, later: &Self) -> bool {
        later.makers.starts_with(&self.makers) && (self.step() < later.step() || self.digest == later.digest)
    }

    /// The digest after so many steps of a job that one worker makes, undisturbed.
    pub fn undisturbed(steps: u64, grains: usize) -> u64 {
        let mut state = Self::default();
        (0..steps).for_each(|_| state.advance(Group::default(), state.contribution(0..grains)));
        state.digest
    }

    /// So many numbers, of which each second one depends on the whole state: parts of two states are never taken for one.
    pub fn numbers(&self, count: usize) -> Vec<u32> {
        let head = [self.makers.len() as u32, self.digest as u32, (self.digest >> 32) as u32];
        let mut told = head.into_iter().chain(self.makers.iter().map(|maker| maker.number()));
        let numbers = (0..count as u64)
            .map(|at| if at % 2 == 0 { told.next().unwrap_or(0) } else { mix(self.digest, at) as u32 });
        let numbers = numbers.collect();
        assert_eq!(told.next(), None, "a state of {} steps is larger than {count} numbers", self.step());
        numbers
    }

    /// The state of which these are the numbers, if they are of one.
    pub fn of_numbers(numbers: &[u32]) -> Option<Self> {
        let mut told = numbers.iter().step_by(2).copied();
        let [steps, low, high] = [told.next()?, told.next()?, told.next()?];
        let makers: Vec<Group> = told.take(steps as usize).map(Group::of_number).collect();
        let state = Self { makers, digest: u64::from(low) | (u64::from(high) << 32) };
        let fits = 2 * (HEAD + steps as usize) <= numbers.len() + 1;
        (fits && state.numbers(numbers.len()) == numbers).then_some(state)
    }
}
