//! Transactional scenarios: which records a reader of committed records sees, and read, write and commit in one
//! transaction.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message;
use rdkafka::{Offset, TopicPartitionList};

use crate::client::{Producer, Reader, Record, config};
use crate::scenario::{Result, Run, Scenario, ensure, fail, fresh, scenario};

/// How long a scenario watches a reader that must not receive any record.
const NOTHING: Duration = Duration::from_millis(1500);
const READ: Duration = Duration::from_secs(45);
const JOIN: Duration = Duration::from_secs(30);
const TIMEOUT_MS: u64 = 2000;
/// How long the abort of an overdue transaction may take. Kafka looks for such transactions every ten seconds.
const ABORTED: Duration = Duration::from_secs(20);
const STEP: usize = 5;
const LIVES: usize = 6;

pub fn scenarios() -> Vec<Scenario> {
    vec![
        scenario("transactions.commit-abort", commit_abort),
        scenario("transactions.open", open),
        scenario("transactions.fencing", fencing),
        scenario("transactions.consume-transform-produce", consume_transform_produce),
        scenario("transactions.gateway-kill", gateway_kill),
        scenario("transactions.timeout", timeout),
    ]
}

fn commit_abort(run: &mut Run) -> Result {
    let topic = run.topic(2)?;
    let producer = transactional(&fresh("x"))?;
    for name in ["committed", "aborted", "committed-again"] {
        producer.begin()?;
        send_steps(&producer, &topic, name, 2)?;
        if name == "aborted" { producer.abort()? } else { producer.commit()? }
    }
    // A marker takes one offset after every five records.
    let committed = [at(0, "committed"), at(2 * (STEP + 1), "committed-again")].concat();
    let whole = [at(0, "committed"), at(STEP + 1, "aborted"), at(2 * (STEP + 1), "committed-again")].concat();
    let end = 3 * (STEP as i64 + 1);
    for partition in 0..2 {
        for (isolation, due) in [("read_committed", &committed), ("read_uncommitted", &whole)] {
            let what = format!("{isolation}, partition {partition}");
            let reader = Reader::isolated(&topic, partition, isolation)?;
            reads(&reader, due.len(), READ, due, &what)?;
            reads(&reader, 1, NOTHING, &[], &format!("{what}, behind all"))?;
            run.client.wait("the end of the log", || Ok(reader.bounds(&topic, partition)? == (0, end)))?;
        }
    }
    Ok(())
}

fn open(run: &mut Run) -> Result {
    let topic = run.topic(1)?;
    let (other, producer) = (Producer::new(&[], None)?, transactional(&fresh("x"))?);
    let committed = Reader::isolated(&topic, 0, "read_committed")?;
    let uncommitted = Reader::isolated(&topic, 0, "read_uncommitted")?;
    send(&other, &topic, &["before"])?;
    producer.begin()?;
    send_steps(&producer, &topic, "open", 1)?;
    send(&other, &topic, &["behind", "behind"])?;
    let before = ["0 before".to_string()];
    let behind = [format!("{} behind", STEP + 1), format!("{} behind", STEP + 2)];
    let rest = [at(1, "open"), behind.to_vec()].concat();
    reads(&uncommitted, 1 + rest.len(), READ, &[&before[..], &rest].concat(), "uncommitted")?;
    reads(&committed, 1, READ, &before, "committed")?;
    reads(&committed, 1, NOTHING, &[], "committed, while the transaction is open")?;
    let ends = (uncommitted.bounds(&topic, 0)?.1, committed.bounds(&topic, 0)?.1);
    ensure(ends == (STEP as i64 + 3, 1), format!("the high watermark and the last stable offset are {ends:?}"))?;
    producer.commit()?;
    reads(&committed, rest.len(), READ, &rest, "committed, once the transaction has ended")?;
    let end = STEP as i64 + 4;
    run.client.wait("the last stable offset goes on", || Ok(committed.bounds(&topic, 0)?.1 == end))
}

fn fencing(run: &mut Run) -> Result {
    let (topic, id) = (run.topic(1)?, fresh("x"));
    let first = transactional(&id)?;
    first.begin()?;
    send(&first, &topic, &["fenced"])?;
    let second = transactional(&id)?;
    fenced(&first, first.commit())?;
    in_one(&second, &topic, "second")?;
    let third = transactional(&id)?;
    // The second producer has no open transaction, so the first request of its next transaction is fenced.
    fenced(&second, in_one(&second, &topic, "fenced, too"))?;
    in_one(&third, &topic, "third")?;
    let reader = Reader::isolated(&topic, 0, "read_committed")?;
    // Offset 1 is the marker of the first, aborted transaction.
    reads(&reader, 2, READ, &["2 second".to_string(), "4 third".to_string()], "committed")?;
    reads(&reader, 1, NOTHING, &[], "committed, behind all")
}

fn consume_transform_produce(run: &mut Run) -> Result {
    let (source, target, group) = (run.topic(2)?, run.topic(2)?, fresh("g"));
    fill(&source)?;
    let producer = transactional(&fresh("x"))?;
    let reader = GroupReader::open(&group, &source)?;
    transform(&producer, &reader, &reader.read_all(2 * STEP)?, &target, || Ok(()))?;
    producer.abort()?;
    drop(reader);
    let offsets = run.client.committed(&group, &source, 2)?;
    ensure(offsets == [-1, -1], format!("an aborted transaction has committed {offsets:?}"))?;
    let reader = GroupReader::open(&group, &source)?;
    for _ in 0..8 {
        transform(&producer, &reader, &reader.read_all(STEP)?, &target, || Ok(()))?;
        producer.commit()?;
    }
    drop(reader);
    let half = 4 * STEP as i64;
    run.client.wait("all is committed", || Ok(run.client.committed(&group, &source, 2)? == [half, half]))?;
    exactly_once(&group, &source, &target)
}

/// Kills the gateway between a transaction's records and its offsets. After an error the producer starts again with the
/// same transactional id, from the committed offsets, as Kafka's documentation says.
fn gateway_kill(run: &mut Run) -> Result {
    let (source, target, group, id) = (run.topic(2)?, run.topic(2)?, fresh("g"), fresh("x"));
    fill(&source)?;
    let (mut killed, mut done) = (false, 0);
    for life in 1.. {
        let mut live = || -> Result {
            let producer = transactional(&id)?;
            let reader = GroupReader::open(&group, &source)?;
            while done < 8 * STEP {
                let found = reader.read(STEP, JOIN)?;
                if found.is_empty() {
                    // Either the transaction of unknown outcome was committed, or records are only late.
                    let half = 4 * STEP as i64;
                    if run.client.committed(&group, &source, 2)? == [half, half] {
                        done = 8 * STEP;
                    }
                    continue;
                }
                transform(&producer, &reader, &found, &target, || {
                    if killed || done < 2 * STEP {
                        return Ok(());
                    }
                    killed = true;
                    run.control("/kill")
                })?;
                producer.commit()?;
                done += found.len();
            }
            Ok(())
        };
        match live() {
            Ok(()) => break,
            Err(error) => eprintln!("life {life} ended with {error:?}"),
        }
        ensure(life < LIVES, format!("{done} records are known to be committed"))?;
    }
    ensure(killed, "it was all read before the gateway was killed")?;
    exactly_once(&group, &source, &target)
}

fn timeout(run: &mut Run) -> Result {
    let (topic, id) = (run.topic(1)?, fresh("x"));
    let producer = Producer::transactional(&id, TIMEOUT_MS)?;
    let reader = Reader::isolated(&topic, 0, "read_committed")?;
    producer.begin()?;
    send(&producer, &topic, &["left open"])?;
    let started = Instant::now();
    send(&Producer::new(&[], None)?, &topic, &["behind"])?;
    reads(&reader, 1, Duration::from_millis(TIMEOUT_MS / 2), &[], "committed, before the time is over")?;
    reads(&reader, 1, ABORTED, &["1 behind".to_string()], "committed, once the time is over")?;
    run.detail = format!("aborted after {:.1} s", started.elapsed().as_secs_f64());
    ensure(producer.commit().is_err(), "it could commit what had been aborted")?;
    in_one(&transactional(&id)?, &topic, "heir")?;
    reads(&reader, 1, READ, &["3 heir".to_string()], "committed, by the next producer of the id")
}

/// A group member that does not commit offsets itself.
struct GroupReader {
    consumer: BaseConsumer,
    topic: String,
}

impl GroupReader {
    fn open(group: &str, topic: &str) -> Result<GroupReader> {
        let mut config = config();
        config.set("group.id", group).set("enable.auto.commit", "false").set("auto.offset.reset", "earliest");
        config.set("isolation.level", "read_committed").set("session.timeout.ms", "6000");
        config.set("heartbeat.interval.ms", "500").set("fetch.wait.max.ms", "100");
        let consumer: BaseConsumer = config.create()?;
        consumer.subscribe(&[topic])?;
        Ok(GroupReader { consumer, topic: topic.to_string() })
    }

    /// Returns partitions, offsets and values of the next `count` records, or of fewer if they do not arrive in time.
    fn read(&self, count: usize, within: Duration) -> Result<Vec<(i32, i64, String)>> {
        let deadline = Instant::now() + within;
        let mut found = Vec::new();
        while found.len() < count && Instant::now() < deadline {
            match self.consumer.poll(Duration::from_millis(100)) {
                Some(Ok(message)) => found.push((message.partition(), message.offset(), text(message.payload()))),
                Some(Err(KafkaError::MessageConsumption(code))) if passing(code) => {}
                Some(Err(error)) => return Err(error.into()),
                None => {}
            }
        }
        Ok(found)
    }

    fn read_all(&self, count: usize) -> Result<Vec<(i32, i64, String)>> {
        let found = self.read(count, JOIN)?;
        ensure(found.len() == count, format!("{} records were read, not {count}", found.len()))?;
        Ok(found)
    }
}

/// Returns true for an error after which the consumer continues by itself.
fn passing(code: RDKafkaErrorCode) -> bool {
    matches!(code, RDKafkaErrorCode::AllBrokersDown | RDKafkaErrorCode::BrokerTransportFailure)
}

fn transactional(id: &str) -> Result<Producer> {
    Producer::transactional(id, 60_000)
}

/// Sends values to partition 0, and waits until they are acknowledged.
fn send(producer: &Producer, topic: &str, values: &[&str]) -> Result {
    for value in values {
        producer.send(topic, 0, &Record::of(*value))?;
    }
    producer.flush().map(|_| ())
}

/// Sends `STEP` records to each partition, and waits until they are acknowledged.
fn send_steps(producer: &Producer, topic: &str, name: &str, partitions: i32) -> Result {
    for index in 0..STEP {
        for partition in 0..partitions {
            producer.send(topic, partition, &Record::of(format!("{name} {index}")))?;
        }
    }
    producer.flush().map(|_| ())
}

/// Returns what `reads` expects of `send_steps` if they begin at an offset.
fn at(offset: usize, name: &str) -> Vec<String> {
    (0..STEP).map(|index| format!("{} {name} {index}", offset + index)).collect()
}

fn reads(reader: &Reader, count: usize, within: Duration, due: &[String], what: &str) -> Result {
    let found: Vec<String> = reader
        .read_for(count, within)?
        .iter()
        .map(|(offset, record)| format!("{offset} {}", text(record.value.as_deref())))
        .collect();
    ensure(found == due, format!("{what}: read {found:?}, not {due:?}"))
}

fn text(value: Option<&[u8]>) -> String {
    String::from_utf8_lossy(value.unwrap_or_default()).into_owned()
}

fn in_one(producer: &Producer, topic: &str, value: &str) -> Result {
    producer.begin()?;
    send(producer, topic, &[value])?;
    producer.commit()
}

fn fenced(producer: &Producer, outcome: Result) -> Result {
    match (outcome, producer.fatal()) {
        (Err(_), Some(RDKafkaErrorCode::Fenced)) => Ok(()),
        (outcome, fatal) => fail(format!("a producer that another one of its id has followed: {outcome:?}, {fatal:?}")),
    }
}

/// Produces forty records in two partitions.
fn fill(topic: &str) -> Result {
    let producer = Producer::new(&[], None)?;
    for index in 0..8 * STEP {
        producer.send(topic, index as i32 % 2, &Record::of(format!("v{index}")))?;
    }
    producer.flush().map(|_| ())
}

/// Does all steps of a transaction except its end. `between` runs between the records and the offsets.
fn transform(
    producer: &Producer,
    reader: &GroupReader,
    found: &[(i32, i64, String)],
    target: &str,
    between: impl FnOnce() -> Result,
) -> Result {
    producer.begin()?;
    let mut positions = BTreeMap::new();
    for (partition, offset, value) in found {
        producer.send(target, *partition, &Record::of(format!("made of {value}")))?;
        positions.insert(*partition, offset + 1);
    }
    producer.flush()?;
    between()?;
    let mut offsets = TopicPartitionList::new();
    for (partition, position) in positions {
        offsets.add_partition_offset(&reader.topic, partition, Offset::Offset(position))?;
    }
    producer.send_offsets(&offsets, &reader.consumer)
}

/// Ensures that each record is in the target once, in its partition's order, and that the group has read them all.
fn exactly_once(group: &str, source: &str, target: &str) -> Result {
    for partition in 0..2 {
        let reader = Reader::isolated(target, partition, "read_committed")?;
        let found: Vec<String> =
            reader.read_for(4 * STEP, READ)?.iter().map(|(_, record)| text(record.value.as_deref())).collect();
        let due: Vec<String> =
            (0..4 * STEP).map(|index| format!("made of v{}", 2 * index as i32 + partition)).collect();
        ensure(found == due, format!("partition {partition} holds {found:?}"))?;
        reads(&reader, 1, NOTHING, &[], &format!("partition {partition}, behind all"))?;
    }
    let again = GroupReader::open(group, source)?.read(1, 3 * NOTHING)?;
    ensure(again.is_empty(), format!("read again by the group: {again:?}"))
}
