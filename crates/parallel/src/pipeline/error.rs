//! What can be wrong with a schedule. Messages count ranks, stages, micro-batches and positions from 0, as the text form does;
//! lines and columns from 1.

use super::schedule::{Action, Channel};
use std::fmt;

/// The most ranks that a message about a deadlock names.
const WAITS_SHOWN_MAX: usize = 8;

/// A rank that cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    pub rank: usize,
    pub position: usize,
    pub action: Action,
    /// What it waits for, and the rank that has it.
    pub wanted: Action,
    pub from: usize,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, position, action, wanted, from } = self;
        write!(f, "rank {rank} waits at position {position} (`{action}`) for `{wanted}` of ")?;
        if rank == from { write!(f, "its own") } else { write!(f, "rank {from}") }
    }
}

/// Why something is not a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScheduleError {
    /// Numbers do not fit together, or are too large.
    Size { message: String, hint: String },
    /// A text is not in the text form.
    Text { line: usize, column: usize, message: String, hint: String },
    /// An action is wrong where it stands.
    Action { rank: usize, position: usize, action: Action, message: String, hint: String },
    /// No rank runs this.
    Missing { rank: usize, action: Action, hint: String },
    /// Each of these ranks waits for the next, and the last for the first.
    Deadlock { waits: Vec<Wait> },
    /// A rank reads the messages of a channel in another order than they are sent.
    ChannelOrder { channel: Channel, message: usize, sent: Action, wanted: Action, position: usize },
}

impl ScheduleError {
    pub(super) fn size(message: String, hint: String) -> Self {
        Self::Size { message, hint }
    }

    /// What to do about it.
    pub fn hint(&self) -> String {
        match self {
            Self::Size { hint, .. }
            | Self::Text { hint, .. }
            | Self::Action { hint, .. }
            | Self::Missing { hint, .. } => hint.clone(),
            Self::Deadlock { .. } => "move one of these actions before the one its rank waits at".into(),
            Self::ChannelOrder { channel, .. } => {
                format!("let rank {} take the micro-batches in the order of rank {}", channel.to, channel.from)
            }
        }
    }
}

impl fmt::Display for ScheduleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size { message, .. } => write!(f, "{message}"),
            Self::Text { line, column, message, .. } => write!(f, "line {line}, column {column}: {message}"),
            Self::Action { rank, position, action, message, .. } => {
                write!(f, "rank {rank}, position {position}: `{action}` {message}")
            }
            Self::Missing { rank, action, .. } => write!(f, "rank {rank}: `{action}` is missing"),
            Self::Deadlock { waits } => {
                write!(f, "deadlock: ")?;
                for (number, wait) in waits.iter().take(WAITS_SHOWN_MAX).enumerate() {
                    write!(f, "{}{wait}", if number > 0 { "; " } else { "" })?;
                }
                match waits.len().saturating_sub(WAITS_SHOWN_MAX) {
                    0 => Ok(()),
                    more => write!(f, "; and {more} more ranks"),
                }
            }
            Self::ChannelOrder { channel, message, sent, wanted, position } => write!(
                f,
                "rank {}, position {position}: message {message} on the channel for {channel} is what `{sent}` sends, \
                 but `{wanted}` is read there",
                channel.to
            ),
        }
    }
}

impl std::error::Error for ScheduleError {}
