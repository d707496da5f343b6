// Transactional scenarios: which records a reader of committed records sees, and read, write and commit in one
// transaction.

import { randomBytes } from 'node:crypto'
import { assert, scenario, waitUntil } from './suite.mjs'

/** How long a scenario watches a reader that must not receive any record. */
const NOTHING_MS = 1500
const READ_MS = 10_000
const JOIN_MS = 20_000
const TIMEOUT_MS = 2000
/** How long the abort of an overdue transaction may take. Kafka looks for such transactions every ten seconds. */
const ABORTED_MS = 20_000
const STEP = 5
const LIVES = 6

const newId = () => `x-${randomBytes(5).toString('hex')}`
const record = (partition, value) => ({ partition, value: Buffer.from(value) })

/** Makes `STEP` records for a partition. */
const steps = (partition, name) => Array.from({ length: STEP }, (_, index) => record(partition, `${name} ${index}`))

/** Returns what `reads` expects of `steps` if they begin at an offset. */
const at = (offset, name) => steps(0, name).map(({ value }, index) => `${offset + index} ${value}`)

async function reads(reader, count, milliseconds, due, what) {
  const found = (await reader.read(count, milliseconds)).map(({ offset, value }) => `${offset} ${value}`)
  assert(String(found) === String(due), `${what}: read ${found}, not ${due}`)
}

/** Runs `body`, then closes the clients. Errors of closing are ignored, because the connections may be gone. */
async function quietly(things, body) {
  try {
    return await body()
  } finally {
    for (const thing of things.reverse()) await thing.close().catch(() => {})
  }
}

async function inOne(producer, topic, value) {
  await producer.begin()
  await producer.send(topic, [record(0, value)])
  await producer.commit()
}

async function fenced(run, attempt) {
  const error = await attempt().then(() => null, thrown => thrown)
  assert(error, 'a producer that another one of its id has followed was not fenced')
  if (!run.client.isFenced(error)) throw error
}

/**
 * Waits until the log has this end and this last stable offset. A client without `stableEnd` receives only the last
 * stable offset, as the log's end.
 */
async function ends(run, topic, end, stable) {
  const told = run.client.stableEnd ? end : stable
  await waitUntil(async () => (await run.client.bounds(topic))[1] === told, `the log ends at ${told}`)
  if (!run.client.stableEnd) return
  await waitUntil(async () => (await run.client.stableEnd(topic)) === stable, `the last stable offset is ${stable}`)
}

scenario('transactions.commit-abort', async run => {
  const topic = await run.topic(2)
  const producer = await run.client.transactional(newId())
  await quietly([producer], async () => {
    for (const name of ['committed', 'aborted', 'committed-again']) {
      await producer.begin()
      await producer.send(topic, [...steps(0, name), ...steps(1, name)])
      await (name === 'aborted' ? producer.abort() : producer.commit())
    }
  })
  // A marker takes one offset after every five records.
  const committed = [...at(0, 'committed'), ...at(2 * (STEP + 1), 'committed-again')]
  const whole = [...at(0, 'committed'), ...at(STEP + 1, 'aborted'), ...at(2 * (STEP + 1), 'committed-again')]
  for (const readCommitted of [true, false]) {
    const due = readCommitted ? committed : whole
    const reader = await run.client.reader(topic, 'earliest', { readCommitted })
    await quietly([reader], async () => {
      const found = await reader.read(2 * due.length, READ_MS)
      for (const partition of [0, 1]) {
        const of = found.filter(one => one.partition === partition).map(({ offset, value }) => `${offset} ${value}`)
        assert(String(of) === String(due), `partition ${partition}, ${readCommitted}: read ${of}, not ${due}`)
      }
      await reads(reader, 1, NOTHING_MS, [], 'behind all')
    })
  }
  await ends(run, topic, 3 * (STEP + 1), 3 * (STEP + 1))
})

scenario('transactions.open', async run => {
  const topic = await run.topic(1)
  const [other, producer, committed, uncommitted] = await Promise.all([
    run.client.producer({}),
    run.client.transactional(newId()),
    run.client.reader(topic, 'earliest', { readCommitted: true }),
    run.client.reader(topic, 'earliest', { readCommitted: false })
  ])
  await quietly([other, producer, committed, uncommitted], async () => {
    await other.send(topic, [record(0, 'before')])
    await producer.begin()
    await producer.send(topic, steps(0, 'open'))
    await other.send(topic, [record(0, 'behind'), record(0, 'behind')])
    const rest = [...at(1, 'open'), `${STEP + 1} behind`, `${STEP + 2} behind`]
    await reads(uncommitted, 1 + rest.length, READ_MS, ['0 before', ...rest], 'uncommitted')
    await reads(committed, 1, READ_MS, ['0 before'], 'committed')
    await reads(committed, 1, NOTHING_MS, [], 'committed, while the transaction is open')
    await ends(run, topic, STEP + 3, 1)
    await producer.commit()
    await reads(committed, rest.length, READ_MS, rest, 'committed, once the transaction has ended')
    await ends(run, topic, STEP + 4, STEP + 4)
  })
})

scenario('transactions.fencing', async run => {
  const topic = await run.topic(1)
  const id = newId()
  const [first, second, third, reader] = await Promise.all([
    run.client.transactional(id),
    run.client.transactional(id),
    run.client.transactional(id),
    run.client.reader(topic, 'earliest', { readCommitted: true })
  ])
  await quietly([first, second, third, reader], async () => {
    await first.begin()
    await first.send(topic, [record(0, 'fenced')])
    // A producer takes its transactional id, and fences the previous owner, with its first transaction.
    await second.begin()
    await fenced(run, () => first.commit())
    await second.send(topic, [record(0, 'second')])
    await second.commit()
    await third.begin()
    await fenced(run, () => inOne(second, topic, 'fenced, too'))
    await third.send(topic, [record(0, 'third')])
    await third.commit()
    // Offset 1 is the marker of the first, aborted transaction.
    await reads(reader, 2, READ_MS, ['2 second', '4 third'], 'committed')
    await reads(reader, 1, NOTHING_MS, [], 'committed, behind all')
  })
})

scenario('transactions.consume-transform-produce', async run => {
  const [source, target] = [await run.topic(2, { prefix: 'source' }), await run.topic(2, { prefix: 'target' })]
  const group = run.group()
  await fill(run, source)
  const producer = await run.client.transactional(newId())
  await quietly([producer], async () => {
    const aborted = await run.client.groupReader(group, source)
    await quietly([aborted], async () => {
      await transform(producer, aborted, await readAll(aborted, 2 * STEP), group, target)
      await producer.abort()
    })
    const offsets = await run.client.committed(group, source, 2)
    assert(String(offsets) === '-1,-1', `an aborted transaction has committed ${offsets}`)
    const reader = await run.client.groupReader(group, source)
    await quietly([reader], async () => {
      for (let done = 0; done < 8 * STEP; done += STEP) {
        await transform(producer, reader, await readAll(reader, STEP), group, target)
        await producer.commit()
      }
    })
  })
  const due = `${4 * STEP},${4 * STEP}`
  await waitUntil(async () => String(await run.client.committed(group, source, 2)) === due, 'all is committed')
  await exactlyOnce(run, group, source, target)
})

scenario('transactions.gateway-kill', async run => {
  // Kill the gateway between a transaction's records and its offsets. After an error the producer starts again with the
  // same transactional id, from the committed offsets, as Kafka's documentation says.
  const [source, target] = [await run.topic(2, { prefix: 'source' }), await run.topic(2, { prefix: 'target' })]
  const [group, id] = [run.group(), newId()]
  await fill(run, source)
  let [killed, done] = [false, 0]
  const kill = async () => {
    if (killed || done < 2 * STEP) return
    killed = true
    await run.killGateway()
  }
  const live = async (producer, reader) => {
    while (done < 8 * STEP) {
      const found = await reader.read(STEP, JOIN_MS)
      if (!found.length) {
        // Either the transaction of unknown outcome was committed, or records are only late.
        if (String(await run.client.committed(group, source, 2)) === `${4 * STEP},${4 * STEP}`) done = 8 * STEP
      } else {
        await transform(producer, reader, found, group, target, kill)
        await producer.commit()
        done += found.length
      }
    }
  }
  for (let life = 1; done < 8 * STEP; life += 1) {
    assert(life <= LIVES, `${done} records are known to be committed: ${run.detail}`)
    const things = []
    await quietly(things, async () => {
      things.push(await run.client.transactional(id))
      // The producer takes the transactional id with its first transaction. So the previous transaction has ended
      // before the reader requests the group's offsets.
      await things[0].begin()
      things.push(await run.client.groupReader(group, source))
      await live(...things)
    }).catch(error => {
      process.stderr.write(`life ${life} ended with ${error.stack}\n`)
      run.detail += `life ${life} ended with ${error.message}; `
    })
  }
  assert(killed, 'it was all read before the gateway was killed')
  await exactlyOnce(run, group, source, target)
})

scenario('transactions.timeout', async run => {
  const topic = await run.topic(1)
  const id = newId()
  const [producer, other, heir, reader] = await Promise.all([
    run.client.transactional(id, { timeout: TIMEOUT_MS }),
    run.client.producer({}),
    run.client.transactional(id),
    run.client.reader(topic, 'earliest', { readCommitted: true })
  ])
  await quietly([producer, other, heir, reader], async () => {
    await producer.begin()
    await producer.send(topic, [record(0, 'left open')])
    const started = Date.now()
    await other.send(topic, [record(0, 'behind')])
    await reads(reader, 1, TIMEOUT_MS / 2, [], 'committed, before the time is over')
    await reads(reader, 1, ABORTED_MS, ['1 behind'], 'committed, once the time is over')
    const seconds = ((Date.now() - started) / 1000).toFixed(1)
    const refused = await producer.commit().then(() => false, () => true)
    assert(refused, 'it could commit what had been aborted')
    await inOne(heir, topic, 'heir')
    await reads(reader, 1, READ_MS, ['3 heir'], 'committed, by the next producer of the id')
    run.detail = `aborted after ${seconds} s`
  })
})

/** Produces forty records in two partitions. */
async function fill(run, topic) {
  const producer = await run.client.producer({})
  const records = Array.from({ length: 8 * STEP }, (_, index) => record(index % 2, `v${index}`))
  await quietly([producer], () => producer.send(topic, records))
}

async function readAll(reader, count) {
  const found = await reader.read(count, JOIN_MS)
  assert(found.length === count, `${found.length} records were read, not ${count}`)
  return found
}

/** Does all steps of a transaction except its end. `between` runs between the records and the offsets. */
async function transform(producer, reader, found, group, target, between = async () => {}) {
  await producer.begin()
  await producer.send(target, found.map(({ partition, value }) => record(partition, `made of ${value}`)))
  await between()
  await producer.sendOffsets(reader, group, found)
}

/** Asserts that each record is in the target once, in its partition's order, and that the group has read them all. */
async function exactlyOnce(run, group, source, target) {
  const reader = await run.client.reader(target, 'earliest', { readCommitted: true })
  await quietly([reader], async () => {
    const found = await reader.read(8 * STEP, READ_MS)
    for (const partition of [0, 1]) {
      const of = found.filter(one => one.partition === partition).map(({ value }) => String(value))
      const due = Array.from({ length: 4 * STEP }, (_, index) => `made of v${2 * index + partition}`)
      assert(String(of) === String(due), `partition ${partition} holds ${of}`)
    }
    await reads(reader, 1, NOTHING_MS, [], 'behind all')
  })
  const again = await run.client.groupReader(group, source)
  await quietly([again], () => reads(again, 1, 3 * NOTHING_MS, [], 'read again by the group'))
}
