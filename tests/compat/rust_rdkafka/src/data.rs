//! Data scenarios: produced records are read back, from any starting point.

use rdkafka::Offset;

use crate::client::{Producer, Reader, Record};
use crate::journal::now_ms;
use crate::scenario::{Result, Run, Scenario, ensure, fail, scenario};

const BIG_BYTES: usize = 900_000;

pub fn scenarios() -> Vec<Scenario> {
    let mut all: Vec<Scenario> = ["none", "gzip", "snappy", "lz4", "zstd"]
        .into_iter()
        .map(|codec| scenario(format!("data.codec.{codec}"), move |run| compressed(run, codec)))
        .collect();
    all.push(scenario("data.idempotent", idempotent));
    all.push(scenario("data.seek_and_times", seek_and_times));
    all.push(scenario("data.delete_records", delete_records));
    all
}

fn compressed(run: &mut Run, codec: &str) -> Result {
    let topic = run.topic(1)?;
    let bytes = |text: &str| Some(text.as_bytes().to_vec());
    let mut sent = vec![
        Record::of("plain"),
        Record {
            key: bytes("k"),
            value: bytes("keyed"),
            headers: vec![
                ("h".to_string(), bytes("v")),
                ("h".to_string(), bytes("w")),
                ("nothing".to_string(), None),
                ("ünï".to_string(), bytes("")),
            ],
            timestamp: None,
        },
        Record { key: bytes("tombstone"), ..Record::default() },
        Record { key: bytes(""), value: bytes(""), ..Record::default() },
    ];
    sent.extend(
        (0..50)
            .map(|index| Record { key: bytes(&index.to_string()), ..Record::of(format!("value {index}").repeat(20)) }),
    );
    sent.push(Record::of((0..BIG_BYTES).map(|index| (index * 7919 % 251) as u8).collect::<Vec<u8>>()));
    let producer = Producer::new(&[("compression.type", codec), ("linger.ms", "20")], None)?;
    for record in &sent {
        producer.send(&topic, 0, record)?;
    }
    let offsets: Vec<i64> = producer.flush()?.into_iter().map(|(_, offset)| offset).collect();
    ensure(offsets == (0..sent.len() as i64).collect::<Vec<i64>>(), format!("offsets {offsets:?}"))?;
    let received = Reader::open(&topic, Offset::Beginning)?.read(sent.len())?;
    for (index, ((offset, record), original)) in received.into_iter().zip(sent).enumerate() {
        let same = offset == index as i64
            && (&record.key, &record.value, &record.headers) == (&original.key, &original.value, &original.headers);
        ensure(same, format!("offset {offset} is not what was sent as {index}"))?;
    }
    Ok(())
}

/// Keeps many small batches in flight, then uses a second producer. All records must be stored once and in order.
fn idempotent(run: &mut Run) -> Result {
    let topic = run.topic(1)?;
    for start in [0, 500] {
        let settings = [("enable.idempotence", "true"), ("batch.num.messages", "20")];
        let producer = Producer::new(&settings, None)?;
        for index in start..start + 500 {
            producer.send(&topic, 0, &Record::of(index.to_string()))?;
        }
        producer.flush()?;
    }
    let bounds = run.client.bounds(&topic)?;
    ensure(bounds == (0, 1000), format!("the log spans {bounds:?}"))?;
    for (offset, record) in Reader::open(&topic, Offset::Beginning)?.read(1000)? {
        ensure(record.value == Some(offset.to_string().into_bytes()), format!("offset {offset} is out of order"))?;
    }
    Ok(())
}

fn seek_and_times(run: &mut Run) -> Result {
    let topic = run.topic(1)?;
    let base = now_ms() - 100_000;
    let producer = Producer::new(&[], None)?;
    for index in 0..10 {
        let record = Record { timestamp: Some(base + index * 1000), ..Record::of(index.to_string()) };
        producer.send(&topic, 0, &record)?;
    }
    producer.flush()?;
    ensure(run.client.bounds(&topic)? == (0, 10), "the log spans 0 to 10")?;
    for (timestamp, expected) in [(1, Some(0)), (base + 3000, Some(3)), (base + 3001, Some(4)), (base + 9001, None)] {
        let found = run.client.offset_at(&topic, timestamp)?;
        ensure(found == expected, format!("the offset at {} ms is {found:?}, not {expected:?}", timestamp - base))?;
    }
    let reader = Reader::open(&topic, Offset::Offset(5))?;
    ensure(offsets(&reader.read(2)?) == [5, 6], "from offset 5")?;
    reader.seek(&topic, Offset::Offset(7))?;
    ensure(offsets(&reader.read(3)?) == [7, 8, 9], "from offset 7")?;
    reader.seek(&topic, Offset::Beginning)?;
    let first = reader.read(2)?;
    ensure(offsets(&first) == [0, 1] && first[1].1.timestamp == Some(base + 1000), "from the beginning")?;
    reader.seek(&topic, Offset::End)?;
    reader.reach_end()?;
    producer.send(&topic, 0, &Record::of("after the end"))?;
    producer.flush()?;
    match reader.read(1)?.as_slice() {
        [(10, record)] if record.value.as_deref() == Some(b"after the end") => Ok(()),
        other => fail(format!("from the end: {other:?}")),
    }
}

fn delete_records(run: &mut Run) -> Result {
    let topic = run.topic(1)?;
    let producer = Producer::new(&[], None)?;
    for index in 0..10 {
        producer.send(&topic, 0, &Record::of(index.to_string()))?;
        producer.flush()?;
    }
    run.client.delete_records(&topic, 6)?;
    run.client.wait("the log starts at 6", || Ok(run.client.bounds(&topic)? == (6, 10)))?;
    ensure(offsets(&Reader::open(&topic, Offset::Beginning)?.read(4)?) == [6, 7, 8, 9], "what is left")
}

fn offsets(records: &[(i64, Record)]) -> Vec<i64> {
    records.iter().map(|(offset, _)| *offset).collect()
}
