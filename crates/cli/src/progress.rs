//! What a run shows: a bar on a terminal, plain lines elsewhere, nothing when quiet.

use crate::device::describe;
use crate::output::{self, println};
use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use kolo_train::Observer;
use kolo_train::interrupt;
use kolo_train::log::LogRow;
use kolo_train::machine::{format_count, format_duration};
use kolo_train::trainer::Evaluation;
use std::cell::Cell;
use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Lines of steps come at least so far apart, unless the job asks for every one of them.
const LINE_PAUSE: Duration = Duration::from_secs(1);

/// What works in silence says so that often where there is no terminal.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// A run that takes longer by its first steps says how long, where no bar does.
const LONG_RUN: Duration = Duration::from_secs(60);
/// Steps that are made before that is judged: the first touches the memory, and the others come at their own pace.
const STEPS_JUDGED: usize = 2;
/// How often a spinner turns.
const TURN: Duration = Duration::from_millis(100);

/// A part of a line that shows progress: its template, the columns that it takes, and how much it matters.
pub type Part = (&'static str, usize, u8);

const LEFT: Part = ("{eta} left", 10, 1);
/// While steps are made, and otherwise: only then is it known how long the rest takes.
const STEPPING: &[Part] = &[("{pos}/{len} steps", 18, 2), ("{msg}", 33, 0), LEFT];
const OTHERWISE: &[Part] = &[("{pos}/{len} steps", 18, 2), ("{msg}", 33, 0)];
const COUNTED: &[Part] = &[("{pos}/{len} {msg}", 24, 2), ("{per_sec}", 10, 0), LEFT];
/// Of bytes.
pub const BYTES: &[Part] = &[("{bytes}/{total_bytes}  {msg}", 30, 2), ("{bytes_per_sec}", 12, 0), LEFT];
const SPINNER: &str = "{spinner} {wide_msg} {elapsed}";

const SEPARATOR: &str = "  ";
/// Columns of the bar itself, which takes what the rest of its line leaves.
const BAR_COLUMNS_MAX: usize = 32;
const BAR_COLUMNS_MIN: usize = 8;

/// Columns of the terminal, if standard error is one that tells.
fn columns() -> Option<usize> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call writes one `winsize`, which lives until it returns.
    let told = unsafe { libc::ioctl(libc::STDERR_FILENO, libc::TIOCGWINSZ, &raw mut size) } == 0;
    (told && size.ws_col > 0).then_some(usize::from(size.ws_col))
}

/// The parts that fit into so many columns, those that matter most first, in the order of the line, behind a bar if one fits.
fn fitted(parts: &[Part], columns: usize) -> String {
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse(parts[*at].2));
    // A terminal may begin a new line once its last column is full.
    let mut free = columns.saturating_sub(1);
    let mut kept: Vec<usize> = Vec::new();
    for at in order {
        let wanted = parts[at].1 + if kept.is_empty() { 0 } else { SEPARATOR.len() };
        if let Some(rest) = free.checked_sub(wanted) {
            free = rest;
            kept.push(at);
        }
    }
    kept.sort_unstable();
    let width = free.saturating_sub(SEPARATOR.len()).min(BAR_COLUMNS_MAX);
    let bar = (width >= BAR_COLUMNS_MIN).then(|| format!("{{bar:{width}.cyan/blue}}"));
    let parts = kept.into_iter().map(|at| parts[at].0.to_string());
    bar.into_iter().chain(parts).collect::<Vec<_>>().join(SEPARATOR)
}

fn style(parts: &[Part]) -> ProgressStyle {
    styled(&fitted(parts, columns().unwrap_or(usize::MAX)))
}

fn styled(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// A bar on a terminal that leaves nothing behind, however it ends; `None` where standard error is no terminal.
pub fn bar(total: u64, parts: &[Part]) -> Option<ProgressBar> {
    line(total, || style(parts))
}

fn line(total: u64, style: impl FnOnce() -> ProgressStyle) -> Option<ProgressBar> {
    let shown = std::io::stderr().is_terminal();
    shown.then(|| ProgressBar::new(total).with_style(style()).with_finish(ProgressFinish::AndClear))
}

/// How many of some things are done: a bar on a terminal, a line now and then elsewhere.
#[derive(Debug)]
pub struct Bar {
    bar: Option<ProgressBar>,
    total: usize,
    unit: &'static str,
    last_line: Cell<Instant>,
}

impl Bar {
    /// No bar for nothing.
    pub fn new(total: usize, unit: &'static str) -> Self {
        let bar = (total > 0).then(|| bar(total as u64, COUNTED)).flatten().map(|bar| bar.with_message(unit));
        Self { bar, total, unit, last_line: Cell::new(Instant::now()) }
    }

    pub fn tell(&self, done: usize) {
        if let Some(bar) = &self.bar {
            return bar.set_position(done as u64);
        }
        if self.last_line.get().elapsed() >= SILENCE_MAX {
            self.last_line.set(Instant::now());
            output::print_error(&format!("{done} of {} {}", self.total, self.unit));
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Says that something takes its time, and what, until it is dropped: a spinner on a terminal, a line now and then elsewhere.
#[derive(Debug)]
pub struct Waiting {
    /// Dropped first, which ends the thread.
    going: Option<Sender<()>>,
    teller: Option<JoinHandle<()>>,
}

impl Waiting {
    pub fn new(what: impl Into<String>) -> Self {
        let (going, ended) = mpsc::channel();
        let what = what.into();
        let tell = move || {
            let begin = Instant::now();
            let bar = line(0, || styled(SPINNER)).map(|bar| bar.with_message(what.clone()));
            let pause = if bar.is_some() { TURN } else { SILENCE_MAX };
            while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                match &bar {
                    Some(bar) => bar.tick(),
                    None => output::print_error(&format!("{what}: {} s so far", begin.elapsed().as_secs())),
                }
            }
        };
        // Without a thread there is silence, which costs nothing else.
        let teller = std::thread::Builder::new().name("progress".into()).spawn(tell).ok();
        Self { going: Some(going), teller }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        drop(self.going.take());
        // What is printed next comes after the spinner is gone.
        let _ = self.teller.take().map(JoinHandle::join);
    }
}

#[derive(Clone, Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    /// Whether the bar shows steps.
    stepping: bool,
    /// Whether it is of a run with steps.
    of_run: bool,
    quiet: bool,
    /// A loss that leaps from step to step tells little; this one moves smoothly.
    smooth_loss: Option<f32>,
    /// When the last line was printed, or the run began.
    last_line: Instant,
    /// Of the run; 0 if it is not known here.
    total_steps: usize,
    steps_seen: usize,
}

impl Progress {
    pub fn new(total_steps: usize, quiet: bool) -> Self {
        let bar = (!quiet).then(|| bar(total_steps as u64, OTHERWISE)).flatten();
        let bar = bar.map(|bar| bar.with_message("starting"));
        bar.iter().for_each(ProgressBar::tick);
        Self { bar, total_steps, of_run: true, ..Self::plain(quiet) }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// The workers were asked to end. Those that make no steps of a run do so at once.
    pub fn interrupted(&self) {
        if self.of_run {
            self.note(interrupt::ACKNOWLEDGED);
        }
    }

    /// A view without a bar, for a worker whose steps are shown elsewhere.
    pub fn plain(quiet: bool) -> Self {
        Self {
            bar: None,
            stepping: false,
            of_run: false,
            quiet,
            smooth_loss: None,
            last_line: Instant::now(),
            total_steps: 0,
            steps_seen: 0,
        }
    }

    /// The bar, in the style for steps or for anything else.
    fn bar(&mut self, stepping: bool) -> Option<&ProgressBar> {
        let bar = self.bar.as_ref()?;
        if self.stepping != stepping {
            self.stepping = stepping;
            bar.set_style(style(if stepping { STEPPING } else { OTHERWISE }));
        }
        Some(bar)
    }

    /// Runs `print` with the bar out of the way.
    pub fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// A word beside the run's own.
    pub fn note(&self, text: &str) {
        if !self.quiet {
            self.suspend(|| output::print_error(text));
        }
    }

    /// Says once how long the rest takes, if that is long and nothing else says it.
    fn judge_length(&mut self, step: usize, milliseconds: f64) {
        self.steps_seen += 1;
        let rest = Duration::from_secs_f64(self.total_steps.saturating_sub(step) as f64 * milliseconds.max(0.0) / 1e3);
        if self.bar.is_none() && self.steps_seen == STEPS_JUDGED && rest >= LONG_RUN {
            let each = format_duration(Duration::from_secs_f64(milliseconds / 1e3));
            let (left, rest) = (self.total_steps.saturating_sub(step), format_duration(rest));
            self.note(&format!(
                "note: at {each} a step, the other {left} steps take about {rest}, without evaluations"
            ));
        }
    }

    fn line(&mut self, text: &str) {
        self.last_line = Instant::now();
        if !self.quiet {
            self.suspend(|| println!("{text}"));
        }
    }
}

impl Observer for Progress {
    fn step(&mut self, step: usize, loss: f32, milliseconds: f64) {
        let smooth = self.smooth_loss.map_or(loss, |known| known + 0.1 * (loss - known));
        self.smooth_loss = Some(smooth);
        self.judge_length(step, milliseconds);
        if let Some(bar) = self.bar(true) {
            bar.set_position(step as u64);
            bar.set_message(format!("step loss {smooth:.4}  {milliseconds:.1} ms/step"));
        }
    }

    fn evaluating(&mut self, done: usize, total: usize) {
        if let Some(bar) = self.bar(false) {
            bar.set_message(format!("evaluating {done}/{total} samples"));
        }
    }

    fn ended(&mut self) {
        self.finish();
    }

    fn evaluated(&mut self, step: usize, epoch: usize, loss: f64, evaluation: Option<&Evaluation>) {
        let mut text = format!("epoch {epoch:>3}  step {step:>6}  train loss {loss:.4}");
        if let Some(evaluation) = evaluation {
            text += &format!("  held-out loss {:.4}", evaluation.loss);
            for (name, value) in &evaluation.metrics {
                text += &format!("  {name} {value:.4}");
            }
        }
        self.line(&text);
    }

    fn note(&mut self, text: &str) {
        Progress::note(self, text);
    }

    fn logged(&mut self, row: &LogRow) {
        if !row.asked && self.last_line.elapsed() < LINE_PAUSE {
            return;
        }
        let norm = row.grad_norm.map_or(String::new(), |norm| format!("  norm {norm:.4}"));
        let speed = format_count(row.samples_per_s as u64);
        let (step, epoch, loss, rate) = (row.step, row.epoch, row.loss, row.rate);
        let device = row.device.map(|now| describe(&now)).filter(|text| !text.is_empty());
        let device = device.map_or(String::new(), |text| format!("  GPU {text}"));
        self.line(&format!(
            "epoch {epoch:>3}  step {step:>6}  step loss {loss:.4}  rate {rate:.2e}{norm}  {speed} samples/s{device}"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_keeps_what_matters_most_within_the_terminal() {
        assert_eq!(fitted(STEPPING, 200), "{bar:32.cyan/blue}  {pos}/{len} steps  {msg}  {eta} left");
        assert_eq!(fitted(STEPPING, 80), "{bar:12.cyan/blue}  {pos}/{len} steps  {msg}  {eta} left");
        assert_eq!(fitted(STEPPING, 40), "{pos}/{len} steps  {eta} left");
        assert_eq!(fitted(STEPPING, 20), "{pos}/{len} steps");
        assert_eq!(fitted(STEPPING, 5), "");
    }
}
