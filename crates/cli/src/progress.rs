//! What a run shows: a bar on a terminal, plain lines elsewhere, nothing when quiet.

use indicatif::{ProgressBar, ProgressStyle};
use kolo_train::Observer;
use kolo_train::trainer::Evaluation;
use std::io::IsTerminal;

#[derive(Clone, Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    quiet: bool,
    /// A loss that leaps from step to step tells little; this one moves smoothly.
    smooth_loss: Option<f32>,
}

impl Progress {
    pub fn new(total_steps: usize, quiet: bool) -> Self {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{bar:32.cyan/blue} {pos}/{len} steps  {msg}  {eta} left");
            ProgressBar::new(total_steps as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Self { bar, quiet, smooth_loss: None }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// A view without a bar, for a worker whose steps are shown elsewhere.
    pub fn plain(quiet: bool) -> Self {
        Self { bar: None, quiet, smooth_loss: None }
    }

    /// Runs `print` with the bar out of the way.
    pub fn suspend(&self, print: impl FnOnce()) {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// A word beside the run's own.
    pub fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None if !self.quiet => eprintln!("{text}"),
            None => {}
        }
    }

    fn line(&self, text: String) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None if !self.quiet => println!("{text}"),
            None => {}
        }
    }
}

impl Observer for Progress {
    fn step(&mut self, step: usize, loss: f32, milliseconds: f64) {
        let smooth = self.smooth_loss.map_or(loss, |known| known + 0.1 * (loss - known));
        self.smooth_loss = Some(smooth);
        if let Some(bar) = &self.bar {
            bar.set_position(step as u64);
            bar.set_message(format!("loss {smooth:.4}  {milliseconds:.1} ms/step"));
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
        self.line(text);
    }
}
