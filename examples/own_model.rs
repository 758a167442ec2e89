//! A model of your own with the whole command line around it: `cargo run --release --example own_model -- train JOB.toml`,
//! where the job says `kind = "two-tower"`.

use kolo::prelude::*;

/// Two hidden layers side by side, one with relu and one with tanh, joined before the head.
#[derive(Debug)]
struct TwoTower {
    inputs: Vec<usize>,
    width: usize,
    classes: usize,
}

fn make(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    Ok(Box::new(TwoTower {
        inputs: data_shape(data, "x").unwrap_or(vec![64]),
        width: settings.count("width", 64, 1)?,
        classes: settings.count("classes", data_classes(data, "y").unwrap_or(10), 2)?,
    }))
}

impl Model for TwoTower {
    fn fields(&self) -> Vec<Field> {
        vec![Field::real("x", &self.inputs), Field::index("y", &[], self.classes)]
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let x = cx.field(&fields[0]).reshape_to([cx.batch, self.inputs.iter().product()]);
        let left = cx.linear("left", x, self.width).relu();
        let right = cx.linear("right", x, self.width).tanh();
        let logits = cx.linear("head", left.concat(&[right], 1), self.classes);
        classify(logits, cx.field(&fields[1]), 0.0)
    }
}

fn main() -> std::process::ExitCode {
    kolo::App::new().model("two-tower", "relu and tanh side by side: width classes", make).run()
}
