//! The library without the command line: build a graph, differentiate it, run it.
//!
//! Fits a line to points by plain gradient descent. The update is part of the graph, so a step is one call.

use kolo::prelude::*;

fn main() {
    let builder = Builder::new();
    let x = builder.input("x", Type::f32([8, 1]));
    let y = builder.input("y", Type::f32([8, 1]));
    let weight = builder.param("weight", [1, 1], Init::ZEROS);
    let bias = builder.param("bias", [1], Init::ZEROS);
    let loss = x.linear(weight, Some(bias)).mse(y);
    for (param, grad) in [weight, bias].into_iter().zip(gradients(&builder, loss, 1.0, &[weight, bias])) {
        let grad = grad.expect("the loss depends on both");
        builder.update(param, param.sub(grad.scale(0.1)));
    }
    builder.output("loss", loss);
    let graph = builder.finish().expect("the shapes fit");
    println!("{graph}");

    let mut store = Store::new(&graph, 1);
    let mut session = Session::new(graph, &store, Options::single(1));
    for step in 0..200 {
        session
            .run(
                &mut store,
                |_| {},
                |_, feed| {
                    for at in 0..8 {
                        let value = at as f32 / 4.0 - 1.0;
                        feed.f32("x").expect("an input")[at] = value;
                        feed.f32("y").expect("an input")[at] = 3.0 * value + 0.5;
                    }
                },
            )
            .expect("nothing to exchange");
        if step % 50 == 0 {
            println!("step {step}: loss {:.6}", session.output("loss").expect("an output")[0]);
        }
    }
    let value = |name: &str| store.values(name).expect("a parameter")[0];
    println!("y = {:.3} x + {:.3}", value("weight"), value("bias"));
    assert!((value("weight") - 3.0).abs() < 1e-3 && (value("bias") - 0.5).abs() < 1e-3);
}
