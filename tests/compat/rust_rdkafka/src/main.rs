//! Main program of rust-rdkafka's suite: it runs the scenarios with JSON lines on stdout, or one group member until
//! SIGTERM.

mod admin;
mod client;
mod data;
mod groups;
mod journal;
mod member;
mod scenario;
mod transactions;

use std::collections::HashSet;
use std::sync::Arc;

fn main() {
    if std::env::args().any(|argument| argument == "--version") {
        println!("{} with librdkafka {}", env!("RDKAFKA_VERSION"), rdkafka::util::get_rdkafka_version().1);
        return;
    }
    if let Ok(options) = std::env::var(member::OPTIONS_VARIABLE) {
        std::process::exit(member::be_member(&options));
    }
    let wanted = std::env::var("COMPAT_SCENARIOS").unwrap_or_default();
    let named: HashSet<&str> = wanted.split(',').filter(|name| !name.is_empty()).collect();
    let all = [data::scenarios(), transactions::scenarios(), admin::scenarios(), groups::scenarios()];
    for scenario in all.into_iter().flatten() {
        if named.is_empty() || named.contains(scenario.name.as_str()) {
            eprintln!("==== {}", scenario.name);
            scenario::answer(Arc::new(scenario));
        }
    }
    // If a scenario hangs, its threads must not keep the program running.
    std::process::exit(0);
}
