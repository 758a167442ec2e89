//! A collective as data: what one rank sends, receives and combines, in order.
//!
//! An algorithm is a pure function from (kind, rank, size, counts) to a [`CollectiveProgram`]. A transport that can move bytes
//! between two ranks runs it; so does the simulator; so do the tests, which count its steps and bytes.
//!
//! Instructions stand in order. Each names the earlier ones it must wait for. Sends to one rank leave in order, and
//! receives from one rank are filled in order: the n-th send from `a` to `b` meets the n-th receive at `b` from `a`.

/// Which memory a place is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Region {
    Input,
    Output,
    /// Memory of the transport, `CollectiveProgram::scratch` elements.
    Scratch,
}

/// A run of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferRange {
    pub region: Region,
    pub offset: usize,
    pub count: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveAction {
    Send {
        to: usize,
        from: BufferRange,
    },
    Recv {
        from: usize,
        into: BufferRange,
    },
    Copy {
        from: BufferRange,
        into: BufferRange,
    },
    /// `into = left ⊕ right`, element by element. `into` may be either.
    Combine {
        left: BufferRange,
        right: BufferRange,
        into: BufferRange,
    },
    /// Divide by the number of ranks: the end of a mean.
    Divide {
        range: BufferRange,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    pub action: CollectiveAction,
    /// Earlier instructions, by number, that must be done before this one starts.
    pub after: Vec<usize>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CollectiveProgram {
    pub instructions: Vec<Instruction>,
    /// Elements of scratch.
    pub scratch: usize,
}

impl CollectiveProgram {
    /// Appends an instruction; its number.
    pub fn push(&mut self, action: CollectiveAction, after: &[usize]) -> usize {
        self.instructions.push(Instruction { action, after: after.to_vec() });
        self.instructions.len() - 1
    }

    /// Elements this rank sends.
    pub fn sent(&self) -> usize {
        let sent = |instruction: &Instruction| match instruction.action {
            CollectiveAction::Send { from, .. } => from.count,
            _ => 0,
        };
        self.instructions.iter().map(sent).sum()
    }
}
