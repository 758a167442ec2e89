//! What a run shows: a bar on a terminal, plain lines elsewhere, nothing when quiet.

use crate::device::describe;
use crate::output::{self, println};
use indicatif::{ProgressBar, ProgressStyle};
use kolo_train::Observer;
use kolo_train::interrupt;
use kolo_train::log::LogRow;
use kolo_train::machine::format_count;
use kolo_train::trainer::Evaluation;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Lines of steps come at least so far apart, unless the job asks for every one of them.
const LINE_PAUSE: Duration = Duration::from_secs(1);

/// While steps are made, and otherwise: only then is it known how long the rest takes.
const STEPPING: &str = "{bar:32.cyan/blue} {pos}/{len} steps  {msg}  {eta} left";
const OTHERWISE: &str = "{bar:32.cyan/blue} {pos}/{len} steps  {msg}";

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// A bar of things that are counted, on a terminal.
#[derive(Debug)]
pub struct Bar(Option<ProgressBar>);

impl Bar {
    /// No bar for nothing.
    pub fn new(total: usize, unit: &str) -> Self {
        let template = format!("{{bar:32.cyan/blue}} {{pos}}/{{len}} {unit}  {{per_sec}}  {{eta}} left");
        let shown = total > 0 && std::io::stderr().is_terminal();
        Self(shown.then(|| ProgressBar::new(total as u64).with_style(style(&template))))
    }

    pub fn tell(&self, done: usize) {
        if let Some(bar) = &self.0 {
            bar.set_position(done as u64);
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
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
}

impl Progress {
    pub fn new(total_steps: usize, quiet: bool) -> Self {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(total_steps as u64).with_style(style(OTHERWISE)).with_message("starting");
            bar.tick();
            bar
        });
        Self { bar, stepping: false, of_run: true, quiet, smooth_loss: None, last_line: Instant::now() }
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
        Self { bar: None, stepping: false, of_run: false, quiet, smooth_loss: None, last_line: Instant::now() }
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
        if let Some(bar) = self.bar(true) {
            bar.set_position(step as u64);
            bar.set_message(format!("loss {smooth:.4}  {milliseconds:.1} ms/step"));
        }
    }

    fn evaluating(&mut self, done: usize, total: usize) {
        if let Some(bar) = self.bar(false) {
            bar.set_message(format!("evaluating {done}/{total} samples"));
        }
    }

    fn evaluated(&mut self, step: usize, epoch: usize, loss: f64, evaluation: Option<&Evaluation>) {
        let mut text = format!("epoch {epoch:>3}  step {step:>6}  loss {loss:.4}");
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
            "epoch {epoch:>3}  step {step:>6}  loss {loss:.4}  rate {rate:.2e}{norm}  {speed} samples/s{device}"
        ));
    }
}
