//! A delivery log that many processes append to, with waits for its contents.
//!
//! The one idea: the file is the state. Members, in this process or another, append events, and waiting code reads the
//! file as it grows. So the log of a killed member contains exactly what it had done.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::scenario::{Result, fail};

const POLL: Duration = Duration::from_millis(10);
const WAIT: Duration = Duration::from_secs(45);

pub type Partition = (String, i32);

pub fn all_of(topic: &str, partitions: i32) -> Vec<Partition> {
    (0..partitions).map(|partition| (topic.to_string(), partition)).collect()
}

pub fn now_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64)
}

/// Appends events. Each write is one call on a file opened for appending, so that processes may share the file.
pub struct Journal {
    pub path: PathBuf,
    file: Mutex<File>,
}

impl Journal {
    pub fn open(path: &Path) -> std::io::Result<Arc<Journal>> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        Ok(Arc::new(Journal { path: path.to_path_buf(), file: Mutex::new(file) }))
    }

    pub fn scenario(&self, topic: &str, partitions: i32, cooperative: bool, redelivery_allowed: bool) {
        let mode = if cooperative { "cooperative" } else { "eager" };
        self.write(vec![json!({
            "event": "scenario", "mode": mode, "topic": topic, "partitions": partitions,
            "redelivery_allowed": redelivery_allowed,
        })]);
    }

    pub fn produced(&self, topic: &str, partition: i32, offset: i64) {
        self.write(vec![json!({"event": "produced", "topic": topic, "partition": partition, "offset": offset})]);
    }

    pub fn delivered(&self, member: &str, topic: &str, partition: i32, offset: i64) {
        self.write(vec![json!({
            "event": "delivered", "member": member, "topic": topic, "partition": partition, "offset": offset,
        })]);
    }

    /// `event` is assigned, revoked or lost.
    pub fn ownership(&self, event: &str, member: &str, partitions: &[Partition]) {
        self.write(
            partitions
                .iter()
                .map(|(topic, partition)| {
                    json!({"event": event, "member": member, "topic": topic, "partition": partition})
                })
                .collect(),
        );
    }

    /// `event` is closed or killed.
    pub fn ended(&self, event: &str, member: &str) {
        self.write(vec![json!({"event": event, "member": member, "partition": -1})]);
    }

    fn write(&self, entries: Vec<Value>) {
        let mut file = self.file.lock().unwrap();
        // Times are whole milliseconds. Events of one millisecond keep the order of the file, which is the order of the
        // writes.
        let t = now_ms();
        let mut lines = String::new();
        for mut entry in entries {
            entry["t"] = json!(t);
            lines += &format!("{entry}\n");
        }
        file.write_all(lines.as_bytes()).expect("the delivery log");
    }
}

/// The state that a growing log describes: the owners of partitions, and the produced and delivered records.
pub struct View {
    file: File,
    rest: Vec<u8>,
    pub owned: HashMap<String, HashSet<Partition>>,
    pub delivered: HashMap<(String, i32, i64), usize>,
    pub deliveries: usize,
    pub delivered_by: HashMap<String, usize>,
    pub produced: HashSet<(String, i32, i64)>,
    pub rounds: HashMap<String, usize>,
    pub failures: Arc<Mutex<Vec<String>>>,
}

impl View {
    pub fn open(path: &Path) -> std::io::Result<View> {
        Ok(View {
            file: File::open(path)?,
            rest: Vec::new(),
            owned: HashMap::new(),
            delivered: HashMap::new(),
            deliveries: 0,
            delivered_by: HashMap::new(),
            produced: HashSet::new(),
            rounds: HashMap::new(),
            failures: Arc::default(),
        })
    }

    pub fn refresh(&mut self) {
        self.file.read_to_end(&mut self.rest).expect("the delivery log");
        let end = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let lines: Vec<u8> = self.rest.drain(..end).collect();
        for line in lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            self.take(&serde_json::from_slice(line).expect("a line of the delivery log"));
        }
    }

    fn take(&mut self, entry: &Value) {
        let text = |name: &str| entry[name].as_str().unwrap_or_default().to_string();
        let member = text("member");
        let partition = (text("topic"), entry["partition"].as_i64().unwrap_or(-1) as i32);
        let record = (partition.0.clone(), partition.1, entry["offset"].as_i64().unwrap_or(-1));
        match entry["event"].as_str().unwrap_or_default() {
            "assigned" => {
                *self.rounds.entry(member.clone()).or_default() += 1;
                self.owned.entry(member).or_default().insert(partition);
            }
            "revoked" | "lost" => {
                if let Some(owned) = self.owned.get_mut(&member) {
                    owned.remove(&partition);
                }
            }
            "closed" | "killed" => {
                self.owned.remove(&member);
            }
            "delivered" => {
                *self.delivered.entry(record).or_default() += 1;
                *self.delivered_by.entry(member).or_default() += 1;
                self.deliveries += 1;
            }
            "produced" => {
                self.produced.insert(record);
            }
            _ => {}
        }
    }

    pub fn rounds_of(&self, member: &str) -> usize {
        self.rounds.get(member).copied().unwrap_or(0)
    }

    /// Waits until the log makes `predicate` true. If that takes too long, fails with a message that lists the owners.
    pub fn wait_for(&mut self, what: &str, within: Duration, predicate: impl Fn(&View) -> bool) -> Result {
        let deadline = Instant::now() + within;
        loop {
            self.refresh();
            let failures = self.failures.lock().unwrap().join("; ");
            if !failures.is_empty() {
                return fail(failures);
            }
            if predicate(self) {
                return Ok(());
            }
            if Instant::now() > deadline {
                let mut owned: Vec<String> =
                    self.owned.iter().map(|(member, held)| format!("{member}: {held:?}")).collect();
                owned.sort();
                return fail(format!(
                    "{what}: not within {within:?}; owned: {}; {} of {} records",
                    owned.join("; "),
                    self.delivered.len(),
                    self.produced.len()
                ));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Waits until every partition has exactly one owner, all `members` own a balanced share, and no other member owns
    /// any partition.
    pub fn wait_settled(&mut self, members: &[&str], partitions: &[Partition]) -> Result {
        self.wait_settled_within(members, partitions, WAIT)
    }

    pub fn wait_settled_within(&mut self, members: &[&str], partitions: &[Partition], within: Duration) -> Result {
        let wanted: HashSet<&Partition> = partitions.iter().collect();
        let low = partitions.len() / members.len();
        let high = partitions.len().div_ceil(members.len());
        self.wait_for(&format!("{} partitions settled over {members:?}", partitions.len()), within, |view| {
            let mut seen = HashSet::new();
            for (member, held) in &view.owned {
                if !held.is_empty() && !members.contains(&member.as_str()) {
                    return false;
                }
                if !held.iter().all(|partition| wanted.contains(partition) && seen.insert(partition)) {
                    return false;
                }
            }
            let share = |member: &&str| view.owned.get(*member).map_or(0, HashSet::len);
            seen.len() == wanted.len() && members.iter().map(share).all(|count| (low..=high).contains(&count))
        })
    }

    /// Waits until every record produced so far was delivered.
    pub fn wait_caught_up(&mut self) -> Result {
        self.refresh();
        let wanted = self.produced.clone();
        self.wait_for(&format!("{} records delivered", wanted.len()), WAIT, |view| {
            wanted.iter().all(|record| view.delivered.contains_key(record))
        })
    }

    /// Waits for `count` more records.
    pub fn wait_more(&mut self, count: usize) -> Result {
        self.refresh();
        let wanted = self.deliveries + count;
        self.wait_for(&format!("{count} more records delivered"), WAIT, |view| view.deliveries >= wanted)
    }
}
