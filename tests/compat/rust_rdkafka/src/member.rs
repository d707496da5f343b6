//! Group members: a consumer on a thread of its own, or in a process of its own.
//!
//! Two contexts exist. `Stock` leaves the rebalance to the library's default and only observes it. `Custom` does the
//! rebalance itself: it calls assign and unassign, or their incremental forms, as the group's rebalance protocol
//! requires.

use std::collections::HashMap;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, Rebalance, RebalanceProtocol};
use rdkafka::error::KafkaError;
use rdkafka::message::Message;
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{ClientContext, Offset, TopicPartitionList};
use serde_json::{Value, json};

use crate::client::config;
use crate::journal::{Journal, Partition};
use crate::scenario::{Result, fail};

pub const OPTIONS_VARIABLE: &str = "COMPAT_MEMBER_OPTIONS";

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Callback {
    Stock,
    Custom,
    /// `Custom` with a wrong call before each assignment: the call of the other protocol, which librdkafka must refuse.
    Wrong,
}

/// When offsets are committed: by the client's timer, after each record, or in the revoke callback alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Commit {
    Auto,
    Each,
    Revoke,
}

#[derive(Clone, Debug)]
pub struct Options {
    pub name: String,
    pub group: String,
    pub topics: Vec<String>,
    pub assignor: String,
    pub callback: Callback,
    pub commit: Commit,
    pub instance: Option<String>,
    pub session_ms: u32,
}

impl Options {
    pub fn new(name: &str, group: &str, topics: &[&str], assignor: &str, callback: Callback) -> Options {
        Options {
            name: name.to_string(),
            group: group.to_string(),
            topics: topics.iter().map(ToString::to_string).collect(),
            assignor: assignor.to_string(),
            callback,
            commit: Commit::Auto,
            instance: None,
            session_ms: 6000,
        }
    }

    fn encode(&self, journal: &Journal) -> String {
        json!({
            "name": self.name, "group": self.group, "topics": self.topics, "assignor": self.assignor,
            "custom": self.callback == Callback::Custom, "each": self.commit == Commit::Each,
            "journal": journal.path,
        })
        .to_string()
    }

    fn decode(entry: &Value) -> Options {
        let text = |name: &str| entry[name].as_str().unwrap_or_default();
        let topics: Vec<&str> = entry["topics"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let callback = if entry["custom"] == json!(true) { Callback::Custom } else { Callback::Stock };
        let mut options = Options::new(text("name"), text("group"), &topics, text("assignor"), callback);
        options.commit = if entry["each"] == json!(true) { Commit::Each } else { Commit::Auto };
        options
    }

    fn config(&self) -> rdkafka::ClientConfig {
        let mut config = config();
        config
            .set("group.id", &self.group)
            .set("partition.assignment.strategy", &self.assignor)
            .set("session.timeout.ms", self.session_ms.to_string())
            .set("heartbeat.interval.ms", "300")
            .set("max.poll.interval.ms", self.session_ms.max(10_000).to_string())
            .set("auto.offset.reset", "earliest")
            .set("enable.auto.offset.store", "false")
            .set("enable.auto.commit", (self.commit == Commit::Auto).to_string())
            .set("auto.commit.interval.ms", "200")
            .set("fetch.wait.max.ms", "100")
            .set("fetch.error.backoff.ms", "50")
            .set("topic.metadata.refresh.interval.ms", "500");
        if let Some(instance) = &self.instance {
            config.set("group.instance.id", instance);
        }
        config
    }
}

/// State that a member's callbacks share with its thread.
struct Watch {
    name: String,
    commit: Commit,
    journal: Arc<Journal>,
    /// The offset after the last processed record of each partition. The consumer's own position is no substitute,
    /// because closing takes records from its queue and drops them.
    processed: Mutex<HashMap<Partition, i64>>,
    /// librdkafka's errors for calls that are wrong on purpose. If a right call fails, its error is in `failures`.
    refused: Arc<Mutex<Vec<KafkaError>>>,
    failures: Arc<Mutex<Vec<String>>>,
}

impl Watch {
    fn assigned(&self, partitions: &TopicPartitionList) {
        self.journal.ownership("assigned", &self.name, &listed(partitions));
    }

    /// Commits, if the revoke callback must do so, and logs the revocation. Callbacks call this before the partitions
    /// are revoked, while the member may still commit their offsets.
    fn given_up<C: ConsumerContext>(&self, consumer: &BaseConsumer<C>, partitions: &TopicPartitionList) {
        let lost = consumer.assignment_lost();
        if self.commit == Commit::Revoke && !lost {
            let mut offsets = TopicPartitionList::new();
            for partition in listed(partitions) {
                if let Some(offset) = self.processed.lock().unwrap().remove(&partition) {
                    let added = offsets.add_partition_offset(&partition.0, partition.1, Offset::Offset(offset));
                    added.expect("an offset to commit");
                }
            }
            let answer = if offsets.count() == 0 { Ok(()) } else { consumer.commit(&offsets, CommitMode::Sync) };
            if let Err(error) = answer {
                self.failures.lock().unwrap().push(format!("{}: commit in revoke: {error}", self.name));
            }
        }
        self.journal.ownership(if lost { "lost" } else { "revoked" }, &self.name, &listed(partitions));
    }
}

fn listed(partitions: &TopicPartitionList) -> Vec<Partition> {
    partitions.elements().iter().map(|element| (element.topic().to_string(), element.partition())).collect()
}

struct Stock(Watch);

impl ClientContext for Stock {}

impl ConsumerContext for Stock {
    fn pre_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        match rebalance {
            Rebalance::Assign(partitions) => self.0.assigned(partitions),
            Rebalance::Revoke(partitions) => self.0.given_up(consumer, partitions),
            Rebalance::Error(error) => {
                self.0.failures.lock().unwrap().push(format!("{}: rebalance: {error}", self.0.name));
            }
        }
    }
}

struct Custom {
    watch: Watch,
    wrong_first: bool,
}

impl ClientContext for Custom {}

impl ConsumerContext for Custom {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, reason: RDKafkaRespErr, partitions: &mut TopicPartitionList) {
        let cooperative = matches!(consumer.rebalance_protocol(), RebalanceProtocol::Cooperative);
        let assigns = reason == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS;
        if self.wrong_first && assigns && partitions.count() > 0 {
            let answer =
                if cooperative { consumer.assign(partitions) } else { consumer.incremental_assign(partitions) };
            match answer {
                Err(error) => self.watch.refused.lock().unwrap().push(error),
                Ok(()) => self.watch.failures.lock().unwrap().push("a wrong call was taken".to_string()),
            }
        }
        let answer = if assigns {
            self.watch.assigned(partitions);
            if cooperative { consumer.incremental_assign(partitions) } else { consumer.assign(partitions) }
        } else {
            self.watch.given_up(consumer, partitions);
            if cooperative { consumer.incremental_unassign(partitions) } else { consumer.unassign() }
        };
        if let Err(error) = answer {
            self.watch.failures.lock().unwrap().push(format!("{}: rebalance: {error}", self.watch.name));
        }
    }
}

/// A member on a thread of this process.
pub struct Member {
    pub name: String,
    pub refused: Arc<Mutex<Vec<KafkaError>>>,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    expects_fencing: AtomicBool,
    fenced: AtomicBool,
    topics: Mutex<Option<Vec<String>>>,
}

impl Member {
    pub fn start(options: &Options, journal: Arc<Journal>, failures: Arc<Mutex<Vec<String>>>) -> Result<Arc<Member>> {
        let shared = Arc::new(Shared::default());
        let refused = Arc::new(Mutex::new(Vec::new()));
        let watch = Watch {
            name: options.name.clone(),
            commit: options.commit,
            journal,
            processed: Mutex::default(),
            refused: Arc::clone(&refused),
            failures,
        };
        let config = options.config();
        let (topics, commit, inner) = (options.topics.clone(), options.commit, Arc::clone(&shared));
        let thread = if options.callback == Callback::Stock {
            let consumer: BaseConsumer<Stock> = config.create_with_context(Stock(watch))?;
            std::thread::spawn(move || run(consumer, &topics, commit, &inner, |context| &context.0))
        } else {
            let context = Custom { watch, wrong_first: options.callback == Callback::Wrong };
            let consumer: BaseConsumer<Custom> = config.create_with_context(context)?;
            std::thread::spawn(move || run(consumer, &topics, commit, &inner, |context| &context.watch))
        };
        let name = options.name.clone();
        Ok(Arc::new(Member { name, refused, shared, thread: Mutex::new(Some(thread)) }))
    }

    pub fn request_stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }

    /// Stops the member and waits until it is closed. It leaves the group unless it is static.
    pub fn stop(&self) {
        self.request_stop();
        if let Some(thread) = self.thread.lock().unwrap().take() {
            let _ = thread.join();
        }
    }

    pub fn change_topics(&self, topics: &[&str]) {
        *self.shared.topics.lock().unwrap() = Some(topics.iter().map(ToString::to_string).collect());
    }

    pub fn expect_fencing(&self) {
        self.shared.expects_fencing.store(true, Ordering::Relaxed);
    }

    pub fn fenced(&self) -> bool {
        self.shared.fenced.load(Ordering::Relaxed)
    }
}

fn run<C: ConsumerContext + 'static>(
    consumer: BaseConsumer<C>,
    topics: &[String],
    commit: Commit,
    shared: &Shared,
    watch_of: impl Fn(&C) -> &Watch,
) {
    let context = Arc::clone(consumer.context());
    let watch = watch_of(&context);
    if let Err(error) = consume(&consumer, topics, commit, shared, watch) {
        if shared.expects_fencing.load(Ordering::Relaxed) && consumer.client().fatal_error().is_some() {
            shared.fenced.store(true, Ordering::Relaxed);
        } else {
            watch.failures.lock().unwrap().push(format!("{}: {error}", watch.name));
        }
    }
    // Dropping the consumer closes it in order: the revoke callback runs, and a dynamic member leaves.
    drop(consumer);
    watch.journal.ended("closed", &watch.name);
}

fn consume<C: ConsumerContext + 'static>(
    consumer: &BaseConsumer<C>,
    topics: &[String],
    commit: Commit,
    shared: &Shared,
    watch: &Watch,
) -> std::result::Result<(), KafkaError> {
    let subscribe = |topics: &[String]| consumer.subscribe(&topics.iter().map(String::as_str).collect::<Vec<_>>());
    subscribe(topics)?;
    while !shared.stop.load(Ordering::Relaxed) {
        if let Some(topics) = shared.topics.lock().unwrap().take() {
            subscribe(&topics)?;
        }
        match consumer.poll(Duration::from_millis(50)) {
            Some(Ok(message)) => {
                watch.journal.delivered(&watch.name, message.topic(), message.partition(), message.offset());
                match commit {
                    Commit::Auto => consumer.store_offset_from_message(&message)?,
                    Commit::Each => {
                        // A member that was expelled receives an error here, and joins again.
                        if let Err(error) = consumer.commit_message(&message, CommitMode::Sync) {
                            eprintln!("{}: {error}", watch.name);
                        }
                    }
                    Commit::Revoke => {
                        let partition = (message.topic().to_string(), message.partition());
                        watch.processed.lock().unwrap().insert(partition, message.offset() + 1);
                    }
                }
            }
            Some(Err(error)) => {
                if consumer.client().fatal_error().is_some() {
                    return Err(error);
                }
                // An outage or a deleted topic causes such errors. If an error matters, a wait of the scenario fails.
                eprintln!("{}: {error}", watch.name);
            }
            None => {}
        }
    }
    Ok(())
}

/// A member in a process of its own, which can be killed or stopped.
pub struct MemberProcess {
    name: String,
    journal: Arc<Journal>,
    process: Mutex<Child>,
}

impl MemberProcess {
    pub fn spawn(options: &Options, journal: Arc<Journal>) -> Result<Arc<MemberProcess>> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let process = Command::new(program)
            .env(OPTIONS_VARIABLE, options.encode(&journal))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|error| error.to_string())?;
        Ok(Arc::new(MemberProcess { name: options.name.clone(), journal, process: Mutex::new(process) }))
    }

    /// Kills the process with SIGKILL.
    pub fn kill(&self) {
        self.end();
        self.journal.ended("killed", &self.name);
    }

    /// Stops the process with SIGSTOP. Its connections stay open, but nothing responds on them.
    pub fn freeze(&self) -> Result {
        let pid = self.signal(libc::SIGSTOP)?;
        let mut information: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let flags = libc::WSTOPPED | libc::WNOWAIT;
        if unsafe { libc::waitid(libc::P_PID, pid as libc::id_t, &mut information, flags) } != 0 {
            return fail(std::io::Error::last_os_error().to_string());
        }
        self.journal.ended("killed", &self.name);
        Ok(())
    }

    pub fn thaw(&self) -> Result {
        self.signal(libc::SIGCONT).map(|_| ())
    }

    /// Ends the process with SIGTERM, and waits until it has closed in order.
    pub fn stop(&self) -> Result {
        self.signal(libc::SIGTERM)?;
        let ended = self.process.lock().unwrap().wait().map_err(|error| error.to_string())?;
        if ended.success() { Ok(()) } else { fail(format!("{} ended with {ended}", self.name)) }
    }

    pub fn end(&self) {
        let mut process = self.process.lock().unwrap();
        let _ = process.kill();
        let _ = process.wait();
    }

    fn signal(&self, signal: i32) -> Result<i32> {
        let pid = self.process.lock().unwrap().id() as i32;
        if unsafe { libc::kill(pid, signal) } != 0 {
            return fail(std::io::Error::last_os_error().to_string());
        }
        Ok(pid)
    }
}

static TERMINATED: AtomicBool = AtomicBool::new(false);

extern "C" fn terminate(_signal: i32) {
    TERMINATED.store(true, Ordering::Relaxed);
}

/// Runs one consumer until SIGTERM, then closes it in order. Returns the exit code.
pub fn be_member(encoded: &str) -> i32 {
    let handler: extern "C" fn(i32) = terminate;
    unsafe { libc::signal(libc::SIGTERM, handler as libc::sighandler_t) };
    let entry: Value = serde_json::from_str(encoded).expect("a member's options");
    let journal = Journal::open(entry["journal"].as_str().unwrap_or_default().as_ref()).expect("the delivery log");
    let failures: Arc<Mutex<Vec<String>>> = Arc::default();
    let member = match Member::start(&Options::decode(&entry), journal, Arc::clone(&failures)) {
        Ok(member) => member,
        Err(error) => {
            eprintln!("member: {error:?}");
            return 1;
        }
    };
    while !TERMINATED.load(Ordering::Relaxed) && failures.lock().unwrap().is_empty() {
        std::thread::sleep(Duration::from_millis(20));
    }
    member.stop();
    let failures = failures.lock().unwrap();
    for failure in failures.iter() {
        eprintln!("member: {failure}");
    }
    i32::from(!failures.is_empty())
}
