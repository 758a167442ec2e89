//! The library without the command line: build a graph, differentiate it, run it.
//!
//! Fits a line to points, of which a mask leaves some out. The update is part of the graph, so a step is one call.

use kolo::prelude::*;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let builder = Builder::new();
    let x = builder.input("x", Type::f32([8, 1]));
    let y = builder.input("y", Type::f32([8, 1]));
    let counts = builder.input("counts", Type::new(DType::Bool, [8, 1]));
    let weight = builder.param("weight", [1, 1], Init::ZEROS);
    let bias = builder.param("bias", [1], Init::ZEROS);
    let prediction = x.linear(weight, Some(bias));
    let error = counts.select(prediction.sub(y).square(), builder.scalar(0.0));
    let loss = error.mean_all();
    // Gradients and updates of all parameters; `Optimizer::new(0.1, Sgd { momentum: 0.9, ..Sgd::default() })` has every knob.
    Optimizer::adam(0.1)?.minimize(&builder, loss);
    builder.output("loss", loss);
    builder.output("prediction", prediction);
    let graph = builder.finish()?;
    println!("{graph}");

    let mut store = Store::new(&graph, 1);
    let mut session = Session::new(graph, &store, Options::single(1));
    let points: Vec<f32> = (0..8).map(|at| at as f32 / 4.0 - 1.0).collect();
    // The last point is an outlier, and does not count.
    let targets: Vec<f32> = points.iter().map(|x| if *x > 0.7 { 99.0 } else { 3.0 * x + 0.5 }).collect();
    let mask: Vec<bool> = points.iter().map(|x| *x <= 0.7).collect();
    for step in 0..300 {
        session.step(&mut store, &[("x", (&points).into()), ("y", (&targets).into()), ("counts", (&mask).into())])?;
        if step % 50 == 0 {
            println!("step {step}: loss {:.6}", session.tensor("loss").ok_or("an output")?.to_f64()[0]);
        }
    }
    let prediction = session.tensor("prediction").ok_or("an output")?;
    println!("predictions are {}: {:.2?}", prediction.ty(), prediction.values::<f32>()?);
    let value = |name: &str| store.tensor(name).and_then(|tensor| tensor.to_f64().first().copied()).unwrap_or(f64::NAN);
    println!("y = {:.3} x + {:.3}", value("weight"), value("bias"));
    assert!((value("weight") - 3.0).abs() < 1e-2 && (value("bias") - 0.5).abs() < 1e-2);

    // Values of another type or length are refused before anything runs.
    let wrong =
        session.step(&mut store, &[("x", (&mask).into()), ("y", (&targets).into()), ("counts", (&mask).into())]);
    println!("{}", wrong.err().ok_or("bools are no floats")?);
    Ok(())
}
