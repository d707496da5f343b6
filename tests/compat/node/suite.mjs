// Main program of every Node suite: it runs the scenarios with JSON lines on stdout, or one group member until SIGTERM.
//
// The one idea: a suite is an adapter of one client library. Scenarios are written once against the adapter, and
// nothing here imports a Kafka client.

import { spawn } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { Journal, View } from './journal.mjs'

const SCENARIO_MS = 100_000
const CLEANUP_MS = 15_000
const CONTROL_MS = 90_000
const CHILD_MS = 30_000
const FEED_INTERVAL_MS = 30
const MAX_DETAIL = 600
const MEMBER_VARIABLE = 'COMPAT_MEMBER_OPTIONS'

const scenarios = new Map()

/**
 * Registers a scenario. It passes if it returns, fails if it throws, and is skipped if it throws `Unsupported`. If a
 * suite registers a scenario of its own under a name, the shared scenario of that name is ignored.
 */
export function scenario(name, body) {
  if (!scenarios.has(name)) scenarios.set(name, body)
}

/** The client lacks the feature; the message says why. */
export class Unsupported extends Error {}

export function assert(condition, message) {
  if (!condition) throw new Error(message)
}

export async function waitUntil(predicate, what, milliseconds = 45_000) {
  const deadline = Date.now() + milliseconds
  while (!(await predicate())) {
    assert(Date.now() < deadline, `${what}: not within ${milliseconds / 1000} s`)
    await sleep(20)
  }
}

async function within(promise, milliseconds, what) {
  const timer = new AbortController()
  const late = sleep(milliseconds, undefined, { signal: timer.signal }).then(
    () => {
      throw new Error(`${what}: not within ${milliseconds / 1000} s`)
    },
    () => new Promise(() => {})
  )
  try {
    return await Promise.race([promise, late])
  } finally {
    timer.abort()
  }
}

/** A member in a process of its own, which can be killed or stopped. */
class Child {
  constructor(run, options) {
    this.name = options.name
    this.journal = run.journal
    const encoded = JSON.stringify({ ...options, journal: run.journal.path })
    this.process = spawn(process.execPath, [process.argv[1]], {
      env: { ...process.env, [MEMBER_VARIABLE]: encoded },
      stdio: ['ignore', process.stderr, process.stderr]
    })
    this.ended = new Promise(resolve => this.process.once('exit', (code, signal) => resolve(signal ?? code)))
  }

  /** Kills the process with SIGKILL. */
  async kill() {
    this.process.kill('SIGKILL')
    await this.ended
    this.journal.ended('killed', this.name)
  }

  /** Stops the process with SIGSTOP. Its connections stay open, but nothing responds on them. */
  async freeze() {
    this.process.kill('SIGSTOP')
    const state = () => readFileSync(`/proc/${this.process.pid}/stat`, 'utf8').split(') ')[1][0]
    await waitUntil(() => state() === 'T', `${this.name} stands still`)
    this.journal.ended('killed', this.name)
  }

  thaw() {
    this.process.kill('SIGCONT')
  }

  /** Ends the process with SIGTERM, and waits until it has closed in order. */
  async stop() {
    this.process.kill('SIGTERM')
    const ending = await within(this.ended, CHILD_MS, `${this.name} ends`)
    assert(ending === 0, `${this.name} ended with ${ending}`)
  }

  async end() {
    if (this.process.exitCode === null && this.process.signalCode === null) {
      this.process.kill('SIGKILL')
      await this.ended
    }
  }
}

/** Produces a record to each partition again and again, and logs each acknowledgement. */
class Feed {
  constructor(producer, topic, partitions, journal, outage) {
    Object.assign(this, { producer, topic, partitions, journal, outage, stopped: false, error: null })
    this.ended = this.run()
  }

  async run() {
    for (let round = 0; !this.stopped; round += 1) {
      try {
        const records = this.partitions.map(partition => ({ partition, value: Buffer.from(String(round)) }))
        const offsets = await this.producer.send(this.topic, records)
        records.forEach(({ partition }, index) => this.journal.produced(this.topic, partition, offsets[index]))
      } catch (error) {
        if (!this.outage) {
          this.error = error
          return
        }
      }
      await sleep(FEED_INTERVAL_MS)
    }
  }

  /** Ends after the current round, and throws the error that ended the feed, if any. */
  async stop() {
    this.stopped = true
    await within(this.ended, CONTROL_MS, 'the producer ends')
    if (this.error) throw this.error
  }
}

/** The helpers of one scenario. `end` stops everything that the scenario left running. */
class Run {
  constructor(name, adapter) {
    this.name = name
    this.adapter = adapter
    this.client = adapter.client(process.env.COMPAT_BOOTSTRAP)
    this.path = join(process.env.COMPAT_DELIVERIES, `${adapter.suite}.${name}.jsonl`)
    this.cleanups = [() => this.client.close()]
    this.detail = ''
  }

  get assignor() {
    return this.adapter.assignors[0]
  }

  group() {
    return `g-${randomBytes(5).toString('hex')}`
  }

  /** Creates a topic with a fresh name, or with `name`. */
  async topic(partitions, { prefix = 't', name } = {}) {
    const topic = name ?? `${prefix}-${randomBytes(5).toString('hex')}`
    await this.client.createTopic(topic, partitions)
    return topic
  }

  log(header) {
    this.journal = new Journal(this.path)
    this.cleanups.push(() => this.journal.close())
    this.journal.scenario(header)
    this.view = new View(this.path)
    return this.view
  }

  /** Starts a member in this process. If the member fails, the next wait fails. */
  start(options) {
    const member = this.client.member({ assignor: this.assignor, ...options }, this.journal, error =>
      this.view.failures.push(`${options.name}: ${error.message}`)
    )
    this.cleanups.push(() => member.stop())
    member.start()
    return member
  }

  /** Starts a member in a process of its own. */
  spawn(options) {
    const child = new Child(this, { assignor: this.assignor, ...options })
    this.cleanups.push(() => child.end())
    return child
  }

  /** Starts a feed. A scenario stops the feed before its last assertion. */
  async feed(topic, partitions, { outage = false } = {}) {
    const producer = await this.client.producer({})
    const indexes = Array.from({ length: partitions }, (_, partition) => partition)
    const feed = new Feed(producer, topic, indexes, this.journal, outage)
    this.cleanups.push(async () => {
      feed.stopped = true
      await feed.ended
      await producer.close()
    })
    return feed
  }

  /** Sends `count` records to each partition, and waits until they are acknowledged. */
  async produce(topic, partitions, count) {
    const producer = await this.client.producer({})
    try {
      const records = []
      for (let index = 0; index < count; index += 1) {
        for (let partition = 0; partition < partitions; partition += 1) {
          records.push({ partition, value: Buffer.from(String(index)) })
        }
      }
      const offsets = await producer.send(topic, records)
      records.forEach(({ partition }, index) => this.journal.produced(topic, partition, offsets[index]))
    } finally {
      await producer.close()
    }
  }

  restartGateway() {
    return this.control('/restart')
  }

  killGateway() {
    return this.control('/kill')
  }

  async control(path) {
    const signal = AbortSignal.timeout(CONTROL_MS)
    const answer = await fetch(process.env.COMPAT_CONTROL + path, { method: 'POST', signal })
    assert(answer.ok, `${path}: ${answer.status} ${await answer.text()}`)
  }

  async end() {
    for (const cleanup of this.cleanups.reverse()) {
      try {
        await within(Promise.resolve(cleanup()), CLEANUP_MS, 'cleaning up')
      } catch (error) {
        process.stderr.write(`${this.name}: cleaning up: ${error.stack}\n`)
      }
    }
  }
}

async function attempt(name, body, adapter) {
  const started = Date.now()
  let answer
  const run = new Run(name, adapter)
  try {
    if (adapter.skips[name]) throw new Unsupported(adapter.skips[name])
    await within(body(run), SCENARIO_MS, 'the scenario')
    answer = { outcome: 'passed', detail: run.detail }
  } catch (error) {
    if (!(error instanceof Unsupported)) process.stderr.write(`${name}: ${error.stack}\n`)
    answer = { outcome: error instanceof Unsupported ? 'skipped' : 'failed', detail: error.message }
  }
  const seconds = Math.round((Date.now() - started) / 10) / 100
  await run.end()
  return { scenario: name, outcome: answer.outcome, seconds, detail: answer.detail.slice(0, MAX_DETAIL) }
}

/** Runs one consumer until SIGTERM, then closes it in order. */
async function beMember(adapter, options) {
  const client = adapter.client(process.env.COMPAT_BOOTSTRAP)
  const ended = new Promise(resolve => process.once('SIGTERM', resolve))
  const member = client.member(options, new Journal(options.journal), error => {
    process.stderr.write(`${options.name}: ${error.stack}\n`)
    process.exit(1)
  })
  member.start()
  await ended
  await member.stop()
  await client.close()
  process.exit(0)
}

/** Runs the scenarios named in COMPAT_SCENARIOS, or all, one after the other. */
export async function main(adapter) {
  if (process.argv.includes('--version')) {
    process.stdout.write(`${adapter.version}\n`)
    return
  }
  // A rejected promise that no code awaits must not end the program. If the error matters, a wait of the scenario
  // fails.
  process.on('unhandledRejection', error => process.stderr.write(`unhandled: ${error?.stack ?? error}\n`))
  process.on('uncaughtException', error => process.stderr.write(`uncaught: ${error?.stack ?? error}\n`))
  const options = process.env[MEMBER_VARIABLE]
  if (options) {
    await beMember(adapter, JSON.parse(options))
    return
  }
  await import('./data.mjs')
  await import('./transactions.mjs')
  await import('./admin.mjs')
  await import('./groups.mjs')
  const named = (process.env.COMPAT_SCENARIOS ?? '').split(',').filter(Boolean)
  for (const [name, body] of scenarios) {
    if (named.length && !named.includes(name)) continue
    process.stderr.write(`${new Date().toISOString()} ==== ${name}\n`)
    process.stdout.write(JSON.stringify(await attempt(name, body, adapter)) + '\n')
  }
  // If a scenario hangs, its connections must not keep the program running.
  process.exit(0)
}
