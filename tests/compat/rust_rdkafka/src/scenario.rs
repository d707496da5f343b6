//! One run of one scenario: its names, delivery log, members and feed, and their end.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::{Client, Producer, Record};
use crate::journal::{Journal, View, now_ms};
use crate::member::{Callback, Member, MemberProcess, Options};

const SCENARIO: Duration = Duration::from_secs(100);
const CONTROL: Duration = Duration::from_secs(90);
const FEED_INTERVAL: Duration = Duration::from_millis(30);
const MAX_DETAIL: usize = 600;

/// The reason why a scenario did not pass.
#[derive(Debug)]
pub enum Stop {
    Failed(String),
    /// The client lacks the feature.
    Skipped(String),
}

pub type Result<T = ()> = std::result::Result<T, Stop>;

impl From<String> for Stop {
    fn from(message: String) -> Stop {
        Stop::Failed(message)
    }
}

impl From<rdkafka::error::KafkaError> for Stop {
    fn from(error: rdkafka::error::KafkaError) -> Stop {
        Stop::Failed(error.to_string())
    }
}

pub fn fail<T>(message: impl Into<String>) -> Result<T> {
    Err(Stop::Failed(message.into()))
}

pub fn skip<T>(reason: impl Into<String>) -> Result<T> {
    Err(Stop::Skipped(reason.into()))
}

pub fn ensure(condition: bool, message: impl Into<String>) -> Result {
    if condition { Ok(()) } else { fail(message) }
}

pub type Body = Box<dyn Fn(&mut Run) -> Result + Send + Sync>;

pub struct Scenario {
    pub name: String,
    pub body: Body,
}

pub fn scenario(name: impl Into<String>, body: impl Fn(&mut Run) -> Result + Send + Sync + 'static) -> Scenario {
    Scenario { name: name.into(), body: Box::new(body) }
}

/// Produces a record to each partition again and again, and logs each acknowledgement.
pub struct Feed {
    stopped: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<Result>>>,
}

impl Feed {
    fn start(topic: &str, partitions: i32, journal: Arc<Journal>) -> Result<Arc<Feed>> {
        let stopped = Arc::new(AtomicBool::new(false));
        let (topic, told) = (topic.to_string(), Arc::clone(&stopped));
        let producer = Producer::new(&[], Some(journal))?;
        let thread = std::thread::spawn(move || {
            let mut round = 0;
            while !told.load(Ordering::Relaxed) {
                for partition in 0..partitions {
                    producer.send(&topic, partition, &Record::of(round.to_string()))?;
                }
                round += 1;
                std::thread::sleep(FEED_INTERVAL);
            }
            producer.flush().map(|_| ())
        });
        Ok(Arc::new(Feed { stopped, thread: Mutex::new(Some(thread)) }))
    }

    /// Stops the feed and waits until all records that it sent are acknowledged.
    pub fn stop(&self) -> Result {
        self.stopped.store(true, Ordering::Relaxed);
        match self.thread.lock().unwrap().take() {
            Some(thread) => thread.join().unwrap_or_else(|_| fail("the feed panicked")),
            None => Ok(()),
        }
    }
}

/// The helpers of one scenario. `end` stops everything that the scenario left running.
pub struct Run {
    pub client: Client,
    pub detail: String,
    path: PathBuf,
    journal: Option<Arc<Journal>>,
    failures: Arc<Mutex<Vec<String>>>,
    members: Vec<Arc<Member>>,
    processes: Vec<Arc<MemberProcess>>,
    feeds: Vec<Arc<Feed>>,
}

static NAMES: AtomicUsize = AtomicUsize::new(0);

/// Returns a name that no other scenario or run uses.
pub fn fresh(prefix: &str) -> String {
    format!("{prefix}-{:x}-{}", now_ms(), NAMES.fetch_add(1, Ordering::Relaxed))
}

impl Run {
    fn new(name: &str) -> Result<Run> {
        let suite = std::env::var("COMPAT_SUITE").unwrap_or_else(|_| "rust_rdkafka".to_string());
        let deliveries = PathBuf::from(std::env::var("COMPAT_DELIVERIES").expect("COMPAT_DELIVERIES"));
        Ok(Run {
            client: Client::new()?,
            detail: String::new(),
            path: deliveries.join(format!("{suite}.{name}.jsonl")),
            journal: None,
            failures: Arc::default(),
            members: Vec::new(),
            processes: Vec::new(),
            feeds: Vec::new(),
        })
    }

    pub fn topic(&self, partitions: i32) -> Result<String> {
        let topic = fresh("t");
        self.client.create_topic(&topic, partitions)?;
        Ok(topic)
    }

    pub fn log(&mut self, topic: &str, partitions: i32, cooperative: bool, redelivery_allowed: bool) -> Result<View> {
        let journal = Journal::open(&self.path).map_err(|error| error.to_string())?;
        journal.scenario(topic, partitions, cooperative, redelivery_allowed);
        self.journal = Some(journal);
        let mut view = View::open(&self.path).map_err(|error| error.to_string())?;
        view.failures = Arc::clone(&self.failures);
        Ok(view)
    }

    fn journal(&self) -> Arc<Journal> {
        Arc::clone(self.journal.as_ref().expect("a delivery log"))
    }

    /// Starts a member on a thread. If the member fails, the next wait fails.
    pub fn start(&mut self, options: &Options) -> Result<Arc<Member>> {
        let member = Member::start(options, self.journal(), Arc::clone(&self.failures))?;
        self.members.push(Arc::clone(&member));
        Ok(member)
    }

    /// Starts a member in a process of its own.
    pub fn spawn(&mut self, options: &Options) -> Result<Arc<MemberProcess>> {
        let process = MemberProcess::spawn(options, self.journal())?;
        self.processes.push(Arc::clone(&process));
        Ok(process)
    }

    /// Logs that a member owns nothing any more, even if the member does not know that yet.
    pub fn end_ownership(&self, member: &str) {
        self.journal().ended("killed", member);
    }

    /// Starts a feed. A scenario stops the feed before its last assertion.
    pub fn feed(&mut self, topic: &str, partitions: i32) -> Result<Arc<Feed>> {
        let feed = Feed::start(topic, partitions, self.journal())?;
        self.feeds.push(Arc::clone(&feed));
        Ok(feed)
    }

    /// Sends `count` records to each partition, and waits until they are acknowledged.
    pub fn produce(&self, topic: &str, partitions: i32, count: usize) -> Result {
        let producer = Producer::new(&[], Some(self.journal()))?;
        for index in 0..count {
            for partition in 0..partitions {
                producer.send(topic, partition, &Record::of(index.to_string()))?;
            }
        }
        producer.flush().map(|_| ())
    }

    /// Makes the runner restart or kill the gateway: `path` is `/restart` or `/kill`. Returns once the gateway serves
    /// again.
    pub fn control(&self, path: &str) -> Result {
        let said = || -> std::io::Result<String> {
            let address = std::env::var("COMPAT_CONTROL").unwrap_or_default().replace("http://", "");
            let mut stream = TcpStream::connect(&address)?;
            stream.set_read_timeout(Some(CONTROL))?;
            let head =
                format!("POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            stream.write_all(head.as_bytes())?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        let answer = said().map_err(|error| format!("{path}: {error}"))?;
        ensure(answer.split(' ').nth(1) == Some("200"), format!("{path}: {answer}"))
    }

    fn end(&mut self) {
        for member in &self.members {
            member.request_stop();
        }
        for process in &self.processes {
            process.end();
        }
        for feed in &self.feeds {
            let _ = feed.stop();
        }
        for member in &self.members {
            member.stop();
        }
    }
}

/// Runs a scenario on a thread of its own, within its limit, and prints its answer.
pub fn answer(scenario: Arc<Scenario>) {
    let started = Instant::now();
    let name = scenario.name.clone();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let outcome = Run::new(&scenario.name).and_then(|mut run| {
            let outcome = (scenario.body)(&mut run);
            let detail = std::mem::take(&mut run.detail);
            run.end();
            outcome.map(|()| detail)
        });
        let _ = sender.send(outcome);
    });
    let (outcome, detail) = match receiver.recv_timeout(SCENARIO) {
        Ok(Ok(detail)) => ("passed", detail),
        Ok(Err(Stop::Skipped(reason))) => ("skipped", reason),
        Ok(Err(Stop::Failed(message))) => ("failed", message),
        Err(mpsc::RecvTimeoutError::Timeout) => ("failed", format!("did not end in {SCENARIO:?}")),
        Err(mpsc::RecvTimeoutError::Disconnected) => ("failed", "it panicked".to_string()),
    };
    let detail: String = detail.chars().take(MAX_DETAIL).collect();
    let seconds = (started.elapsed().as_millis() as f64 / 10.0).round() / 100.0;
    println!("{}", json!({"scenario": name, "outcome": outcome, "seconds": seconds, "detail": detail}));
}

/// The rebalance callbacks that each group scenario runs with, each with the prefix of the scenario's name. The
/// canonical names belong to the library's default.
pub const CALLBACKS: [(Callback, &str); 2] = [(Callback::Stock, "groups."), (Callback::Custom, "groups.custom.")];
