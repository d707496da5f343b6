// Data scenarios: produced records are read back, from any starting point.

import { assert, scenario, Unsupported, waitUntil } from './suite.mjs'

const BIG_BYTES = 900_000

const show = value => (value === null ? 'null' : `${value.length} bytes ${value.toString('hex').slice(0, 40)}`)

function same(one, other) {
  return one === null || other === null ? one === other : one.equals(other)
}

function differs(sent, received) {
  for (const name of ['key', 'value']) {
    const expected = sent[name] ?? null
    if (!same(expected, received[name])) return `${name}: ${show(expected)} came back as ${show(received[name])}`
  }
  const expected = sent.headers ?? []
  if (expected.length !== received.headers.length) return `${received.headers.length} headers, not ${expected.length}`
  for (const [index, [key, value]] of expected.entries()) {
    const [receivedKey, receivedValue] = received.headers[index]
    if (key !== receivedKey || !same(value, receivedValue)) return `header ${key} came back as ${receivedKey}`
  }
  return ''
}

for (const codec of ['none', 'gzip', 'snappy', 'lz4', 'zstd']) {
  scenario(`data.codec.${codec}`, async run => {
    if (run.adapter.codecs[codec] !== true) throw new Unsupported(run.adapter.codecs[codec])
    const topic = await run.topic(1)
    const headers = [
      ['h', Buffer.from('v')],
      ['ünï', Buffer.alloc(0)],
      ...(run.adapter.headers.repeated ? [['many', Buffer.from('1')], ['many', Buffer.from('2')]] : []),
      ...(run.adapter.headers.nulls ? [['nothing', null]] : [])
    ]
    const sent = [
      { value: Buffer.from('plain') },
      { value: Buffer.from('keyed'), key: Buffer.from('k'), headers },
      { value: null, key: Buffer.from('tombstone') },
      { value: Buffer.alloc(0), key: Buffer.alloc(0) },
      ...Array.from({ length: 50 }, (_, index) => ({
        value: Buffer.from(`value ${index}`.repeat(20)),
        key: Buffer.from(String(index))
      })),
      { value: Buffer.from(Uint8Array.from({ length: BIG_BYTES }, (_, index) => (index * 7919) % 251)) }
    ].map(record => ({ partition: 0, ...record }))
    const producer = await run.client.producer({ codec })
    try {
      const offsets = [...(await producer.send(topic, sent.slice(0, -1))), ...(await producer.send(topic, sent.slice(-1)))]
      assert(offsets.every((offset, index) => offset === index), `offsets ${offsets.slice(0, 5)} …`)
    } finally {
      await producer.close()
    }
    const reader = await run.client.reader(topic, 'earliest')
    try {
      const received = await reader.read(sent.length)
      for (const [index, record] of received.entries()) {
        assert(record.offset === index, `offset ${record.offset} in place of ${index}`)
        const difference = differs(sent[index], record)
        assert(!difference, `offset ${index}: ${difference}`)
      }
    } finally {
      await reader.close()
    }
  })
}

scenario('data.idempotent', async run => {
  // Two producers run one after the other. Each sends its batches concurrently, if the client can do so. All records
  // must be stored once, and each batch in one piece.
  const topic = await run.topic(1)
  const batches = 10
  const batchRecords = 50
  let next = 0
  for (let attempt = 0; attempt < 2; attempt += 1) {
    const producer = await run.client.producer({ idempotent: true })
    try {
      const sends = []
      for (let batch = 0; batch < batches; batch += 1) {
        const records = Array.from({ length: batchRecords }, () => ({ partition: 0, value: Buffer.from(String(next++)) }))
        sends.push(producer.send(topic, records))
        if (!run.adapter.overlapsIdempotence) await sends.at(-1)
      }
      await Promise.all(sends)
    } finally {
      await producer.close()
    }
  }
  const bounds = await run.client.bounds(topic)
  assert(String(bounds) === `0,${next}`, `the log spans ${bounds}, not 0,${next}`)
  const reader = await run.client.reader(topic, 'earliest')
  try {
    const values = (await reader.read(next)).map(record => Number(record.value))
    const together = (value, index) => index % batchRecords === 0 || value === values[index - 1] + 1
    assert(values.every(together), `a batch is torn: ${values}`)
    assert(new Set(values).size === next, 'records are missing')
  } finally {
    await reader.close()
  }
})

scenario('data.seek_and_times', async run => {
  const topic = await run.topic(1)
  const base = Date.now() - 100_000
  const producer = await run.client.producer({})
  try {
    for (let index = 0; index < 10; index += 1) {
      await producer.send(topic, [{ partition: 0, value: Buffer.from(String(index)), timestamp: base + index * 1000 }])
    }
    const bounds = await run.client.bounds(topic)
    assert(String(bounds) === '0,10', `the log spans ${bounds}`)
    for (const [time, expected] of [[0, 0], [base + 3000, 3], [base + 3001, 4]]) {
      const found = await run.client.offsetAt(topic, time)
      assert(found === expected, `the offset at ${time - base} ms is ${found}, not ${expected}`)
    }
    for (const [where, expected] of [[7, [7, 8, 9]], ['earliest', [0, 1]]]) {
      const reader = await run.client.reader(topic, where)
      const records = await reader.read(expected.length)
      await reader.close()
      assert(String(records.map(record => record.offset)) === String(expected), `from ${where}: ${records.map(record => record.offset)}`)
      for (const record of records) assert(record.timestamp === base + record.offset * 1000, `time of ${record.offset}`)
    }
    const reader = await run.client.reader(topic, 'latest')
    try {
      await producer.send(topic, [{ partition: 0, value: Buffer.from('after the end') }])
      const [record] = await reader.read(1)
      assert(record.offset === 10 && String(record.value) === 'after the end', `from the end: ${record.offset}`)
    } finally {
      await reader.close()
    }
  } finally {
    await producer.close()
  }
})

scenario('data.delete_records', async run => {
  const topic = await run.topic(1)
  const producer = await run.client.producer({})
  const records = Array.from({ length: 10 }, (_, index) => ({ partition: 0, value: Buffer.from(String(index)) }))
  for (const record of records) await producer.send(topic, [record])
  await producer.close()
  await run.client.deleteRecords(topic, 6)
  await waitUntil(async () => String(await run.client.bounds(topic)) === '6,10', 'the log starts at 6')
  const reader = await run.client.reader(topic, 'earliest')
  try {
    const offsets = (await reader.read(4)).map(record => record.offset)
    assert(String(offsets) === '6,7,8,9', `read ${offsets}`)
  } finally {
    await reader.close()
  }
})
