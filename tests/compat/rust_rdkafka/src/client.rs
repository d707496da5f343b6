//! The clients that scenarios use outside of groups: for producing, reading a partition, and administration.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_executor::block_on;
use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedHeaders, Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{BaseRecord, DeliveryResult, Producer as _, ProducerContext, ThreadedProducer};
use rdkafka::{ClientContext, Offset, TopicPartitionList};

use crate::journal::Journal;
use crate::scenario::{Result, ensure, fail};

pub const TIMEOUT: Duration = Duration::from_secs(20);

/// Returns the common configuration. All clients of the suite share one client id.
pub fn config() -> ClientConfig {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", std::env::var("COMPAT_BOOTSTRAP").expect("COMPAT_BOOTSTRAP"))
        .set("client.id", "compat")
        .set("reconnect.backoff.ms", "50")
        .set("reconnect.backoff.max.ms", "500")
        .set("retry.backoff.ms", "50")
        .set("allow.auto.create.topics", "false");
    if let Ok(debug) = std::env::var("COMPAT_RDKAFKA_DEBUG") {
        config.set("debug", debug);
    }
    config
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    pub key: Option<Vec<u8>>,
    pub value: Option<Vec<u8>>,
    pub headers: Vec<(String, Option<Vec<u8>>)>,
    pub timestamp: Option<i64>,
}

impl Record {
    pub fn of(value: impl Into<Vec<u8>>) -> Record {
        Record { value: Some(value.into()), ..Record::default() }
    }
}

/// Collects the acknowledged records, in the order of the acknowledgements.
pub struct Acknowledgements {
    journal: Option<Arc<Journal>>,
    offsets: Mutex<Vec<(i32, i64)>>,
    errors: Mutex<Vec<String>>,
}

impl ClientContext for Acknowledgements {}

impl ProducerContext for Acknowledgements {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        match result {
            Ok(message) => {
                if let Some(journal) = &self.journal {
                    journal.produced(message.topic(), message.partition(), message.offset());
                }
                self.offsets.lock().unwrap().push((message.partition(), message.offset()));
            }
            Err((error, _)) => self.errors.lock().unwrap().push(error.to_string()),
        }
    }
}

pub struct Producer(ThreadedProducer<Acknowledgements>);

impl Producer {
    pub fn new(settings: &[(&str, &str)], journal: Option<Arc<Journal>>) -> Result<Producer> {
        let mut config = config();
        config.set("linger.ms", "0").set("message.timeout.ms", "60000");
        for (name, value) in settings {
            config.set(*name, *value);
        }
        let acknowledgements = Acknowledgements { journal, offsets: Mutex::default(), errors: Mutex::default() };
        Ok(Producer(config.create_with_context(acknowledgements)?))
    }

    /// Returns a transactional producer, initialized: the previous owner of its transactional id is fenced, and that
    /// owner's transaction aborted.
    pub fn transactional(id: &str, timeout_ms: u64) -> Result<Producer> {
        let timeout_ms = timeout_ms.to_string();
        let producer = Producer::new(
            &[
                ("transactional.id", id),
                ("transaction.timeout.ms", &timeout_ms),
                ("message.timeout.ms", &timeout_ms),
                // After a rebootstrap librdkafka sends a transaction's offsets forever to a broker that it has
                // abandoned.
                ("metadata.recovery.strategy", "none"),
            ],
            None,
        )?;
        producer.0.init_transactions(Duration::from_secs(60))?;
        Ok(producer)
    }

    pub fn begin(&self) -> Result {
        Ok(self.0.begin_transaction()?)
    }

    pub fn commit(&self) -> Result {
        Ok(self.0.commit_transaction(TIMEOUT)?)
    }

    pub fn abort(&self) -> Result {
        Ok(self.0.abort_transaction(TIMEOUT)?)
    }

    /// Commits offsets in this transaction: the positions at which the consumer's group will continue.
    pub fn send_offsets(&self, offsets: &TopicPartitionList, consumer: &BaseConsumer) -> Result {
        let Some(group) = consumer.group_metadata() else { return fail("the consumer is in no group") };
        Ok(self.0.send_offsets_to_transaction(offsets, &group, TIMEOUT)?)
    }

    /// Returns the fatal error that ended the producer, if any.
    pub fn fatal(&self) -> Option<RDKafkaErrorCode> {
        self.0.client().fatal_error().map(|(code, _)| code)
    }

    /// Queues a record. `flush` reports whether it was stored.
    pub fn send(&self, topic: &str, partition: i32, record: &Record) -> Result {
        let mut base: BaseRecord<'_, [u8], [u8]> = BaseRecord::to(topic).partition(partition);
        if let Some(key) = &record.key {
            base = base.key(key.as_slice());
        }
        if let Some(value) = &record.value {
            base = base.payload(value.as_slice());
        }
        if let Some(timestamp) = record.timestamp {
            base = base.timestamp(timestamp);
        }
        if !record.headers.is_empty() {
            let mut headers = OwnedHeaders::new();
            for (key, value) in &record.headers {
                headers = headers.insert(Header { key, value: value.as_ref() });
            }
            base = base.headers(headers);
        }
        self.0.send(base).map_err(|(error, _)| error.into())
    }

    /// Waits until all sent records are acknowledged. Returns their partitions and offsets in the order of the
    /// acknowledgements.
    pub fn flush(&self) -> Result<Vec<(i32, i64)>> {
        self.0.flush(Duration::from_secs(60))?;
        let context = self.0.context();
        let errors = std::mem::take(&mut *context.errors.lock().unwrap());
        if let Some(error) = errors.first() {
            return fail(format!("{} records were not stored: {error}", errors.len()));
        }
        Ok(std::mem::take(&mut context.offsets.lock().unwrap()))
    }
}

/// Reads one partition without a group. The partition is 0 if the caller names none.
pub struct Reader(BaseConsumer);

impl Reader {
    pub fn open(topic: &str, from: Offset) -> Result<Reader> {
        Reader::with(topic, 0, from, "read_committed")
    }

    /// Returns a reader that begins at the start of the log. `isolation` is `read_committed` or `read_uncommitted`.
    pub fn isolated(topic: &str, partition: i32, isolation: &str) -> Result<Reader> {
        Reader::with(topic, partition, Offset::Beginning, isolation)
    }

    fn with(topic: &str, partition: i32, from: Offset, isolation: &str) -> Result<Reader> {
        let mut config = config();
        config.set("group.id", "reader").set("enable.auto.commit", "false").set("fetch.wait.max.ms", "100");
        config.set("enable.partition.eof", "true").set("isolation.level", isolation);
        let consumer: BaseConsumer = config.create()?;
        let mut assignment = TopicPartitionList::new();
        assignment.add_partition_offset(topic, partition, from)?;
        consumer.assign(&assignment)?;
        Ok(Reader(consumer))
    }

    /// Returns the first offset, and the offset after the last record that the isolation level lets the reader read.
    pub fn bounds(&self, topic: &str, partition: i32) -> Result<(i64, i64)> {
        Ok(self.0.fetch_watermarks(topic, partition, TIMEOUT)?)
    }

    pub fn read(&self, count: usize) -> Result<Vec<(i64, Record)>> {
        let records = self.read_for(count, TIMEOUT)?;
        ensure(records.len() == count, format!("read {} of {count} records", records.len()))?;
        Ok(records)
    }

    /// Returns the next `count` records, or fewer if they do not arrive in time.
    pub fn read_for(&self, count: usize, within: Duration) -> Result<Vec<(i64, Record)>> {
        let deadline = Instant::now() + within;
        let mut records = Vec::new();
        while records.len() < count && Instant::now() < deadline {
            match self.0.poll(Duration::from_millis(100)) {
                Some(Ok(message)) => records.push((
                    message.offset(),
                    Record {
                        key: message.key().map(<[u8]>::to_vec),
                        value: message.payload().map(<[u8]>::to_vec),
                        headers: message.headers().map(held).unwrap_or_default(),
                        timestamp: message.timestamp().to_millis(),
                    },
                )),
                Some(Err(KafkaError::PartitionEOF(_))) | None => {}
                Some(Err(error)) => return Err(error.into()),
            }
        }
        Ok(records)
    }

    /// Waits until the reader is at the end of the log.
    pub fn reach_end(&self) -> Result {
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            match self.0.poll(Duration::from_millis(100)) {
                Some(Err(KafkaError::PartitionEOF(_))) => return Ok(()),
                Some(Err(error)) => return Err(error.into()),
                Some(Ok(message)) => return fail(format!("offset {} at the end", message.offset())),
                None => {}
            }
        }
        fail("the end is not reached")
    }

    pub fn seek(&self, topic: &str, to: Offset) -> Result {
        Ok(self.0.seek(topic, 0, to, TIMEOUT)?)
    }
}

fn held(headers: &BorrowedHeaders) -> Vec<(String, Option<Vec<u8>>)> {
    headers.iter().map(|header| (header.key.to_string(), header.value.map(<[u8]>::to_vec))).collect()
}

/// A client for administration. It also reads and commits offsets of groups of which it is not a member.
pub struct Client {
    admin: AdminClient<DefaultClientContext>,
    consumer: BaseConsumer,
}

impl Client {
    pub fn new() -> Result<Client> {
        let consumer = config().set("group.id", "nobody").create()?;
        Ok(Client { admin: config().create()?, consumer })
    }

    fn options() -> AdminOptions {
        AdminOptions::new().request_timeout(Some(TIMEOUT)).operation_timeout(Some(TIMEOUT))
    }

    pub fn create_topic(&self, topic: &str, partitions: i32) -> Result {
        let new = NewTopic::new(topic, partitions, TopicReplication::Fixed(1));
        single(block_on(self.admin.create_topics([&new], &Self::options()))?)?;
        // Wait until the metadata has the topic, so that consumers do not begin by requesting a topic that does not
        // exist.
        self.wait("the new topic", || Ok(self.partitions(topic)? == partitions as usize))
    }

    pub fn delete_topic(&self, topic: &str) -> Result {
        single(block_on(self.admin.delete_topics(&[topic], &Self::options()))?)
    }

    pub fn add_partitions(&self, topic: &str, total: usize) -> Result {
        let new = NewPartitions::new(topic, total);
        single(block_on(self.admin.create_partitions([&new], &Self::options()))?)
    }

    /// Returns the number of partitions, or 0 if no such topic exists.
    pub fn partitions(&self, topic: &str) -> Result<usize> {
        let metadata = self.consumer.fetch_metadata(None, TIMEOUT)?;
        Ok(metadata.topics().iter().find(|found| found.name() == topic).map_or(0, |found| found.partitions().len()))
    }

    pub fn delete_records(&self, topic: &str, before: i64) -> Result {
        let mut offsets = TopicPartitionList::new();
        offsets.add_partition_offset(topic, 0, Offset::Offset(before))?;
        let answer = block_on(self.admin.delete_records(&offsets, &Self::options()))?;
        for element in answer.elements() {
            element.error()?;
        }
        Ok(())
    }

    pub fn topic_config(&self, topic: &str, name: &str) -> Result<Option<String>> {
        let resources = [ResourceSpecifier::Topic(topic)];
        let answers = block_on(self.admin.describe_configs(&resources, &Self::options()))?;
        match answers.into_iter().next() {
            Some(Ok(resource)) => Ok(resource.get(name).and_then(|entry| entry.value.clone())),
            other => fail(format!("describe_configs: {other:?}")),
        }
    }

    pub fn set_topic_config(&self, topic: &str, name: &str, value: &str) -> Result {
        let change = AlterConfig::new(ResourceSpecifier::Topic(topic)).set(name, value);
        match block_on(self.admin.alter_configs([&change], &Self::options()))?.into_iter().next() {
            Some(Ok(_)) => Ok(()),
            other => fail(format!("alter_configs: {other:?}")),
        }
    }

    pub fn groups(&self) -> Result<Vec<String>> {
        let list = self.consumer.fetch_group_list(None, TIMEOUT)?;
        Ok(list.groups().iter().map(|group| group.name().to_string()).collect())
    }

    /// Returns the group's state, and the client ids of its members.
    pub fn describe_group(&self, group: &str) -> Result<(String, Vec<String>)> {
        let list = self.consumer.fetch_group_list(Some(group), TIMEOUT)?;
        let Some(found) = list.groups().first() else { return fail("no such group") };
        let members = found.members().iter().map(|member| member.client_id().to_string()).collect();
        Ok((found.state().to_string(), members))
    }

    pub fn delete_group(&self, group: &str) -> Result {
        single(block_on(self.admin.delete_groups(&[group], &Self::options()))?)
    }

    pub fn bounds(&self, topic: &str) -> Result<(i64, i64)> {
        Ok(self.consumer.fetch_watermarks(topic, 0, TIMEOUT)?)
    }

    /// Returns the offset of the first record at or after a time, or None if no such record exists.
    pub fn offset_at(&self, topic: &str, timestamp: i64) -> Result<Option<i64>> {
        let mut times = TopicPartitionList::new();
        times.add_partition_offset(topic, 0, Offset::Offset(timestamp))?;
        let found = self.consumer.offsets_for_times(times, TIMEOUT)?;
        match found.find_partition(topic, 0).map(|element| element.offset()) {
            Some(Offset::Offset(offset)) => Ok(Some(offset)),
            Some(Offset::End) => Ok(None),
            other => fail(format!("offsets_for_times: {other:?}")),
        }
    }

    /// Returns the committed offsets, with −1 for a partition that has none.
    pub fn committed(&self, group: &str, topic: &str, partitions: i32) -> Result<Vec<i64>> {
        let consumer: BaseConsumer = config().set("group.id", group).create()?;
        let mut wanted = TopicPartitionList::new();
        wanted.add_partition_range(topic, 0, partitions - 1);
        let found = consumer.committed_offsets(wanted, TIMEOUT)?;
        Ok(found
            .elements()
            .iter()
            .map(|element| element.offset().to_raw().filter(|raw| *raw >= 0).unwrap_or(-1))
            .collect())
    }

    pub fn commit(&self, group: &str, topic: &str, offsets: &[i64]) -> Result {
        let consumer: BaseConsumer = config().set("group.id", group).create()?;
        let mut list = TopicPartitionList::new();
        for (partition, offset) in offsets.iter().enumerate() {
            list.add_partition_offset(topic, partition as i32, Offset::Offset(*offset))?;
        }
        Ok(consumer.commit(&list, CommitMode::Sync)?)
    }

    pub fn wait(&self, what: &str, condition: impl Fn() -> Result<bool>) -> Result {
        let deadline = Instant::now() + TIMEOUT;
        while !condition()? {
            if Instant::now() > deadline {
                return fail(format!("{what}: not within {TIMEOUT:?}"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

fn single(answers: Vec<std::result::Result<String, (String, RDKafkaErrorCode)>>) -> Result {
    match answers.into_iter().next() {
        Some(Ok(_)) => Ok(()),
        Some(Err((name, code))) => fail(format!("{name}: {code:?}")),
        None => fail("no answer"),
    }
}
