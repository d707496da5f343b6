package compat

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
)

// memberVariable is the environment variable with the options of a member. A process that finds it set runs that
// member.
const memberVariable = "COMPAT_MEMBER_OPTIONS"

// MemberProcess is a member in a process of its own, which can be killed and stopped. The process writes its events to
// a pipe, so that events from before a kill can still be read.
type MemberProcess struct {
	*Ownership
	command *exec.Cmd
	stdin   io.WriteCloser
	read    chan struct{}
	ended   sync.Once
}

type pipe struct {
	mu      sync.Mutex
	encoder *json.Encoder
}

func (p *pipe) Write(event Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if event.T == 0 {
		event.T = now()
	}
	if err := p.encoder.Encode(event); err != nil {
		fmt.Fprintln(os.Stderr, "member:", err)
		os.Exit(1)
	}
}

// runMemberProcess runs a member until standard input ends. It returns the exit code.
func runMemberProcess(join JoinFunc, encoded string) int {
	var options Options
	if err := json.Unmarshal([]byte(encoded), &options); err != nil {
		fmt.Fprintln(os.Stderr, "member:", err)
		return 1
	}
	consumer, err := join(options, &pipe{encoder: json.NewEncoder(os.Stdout)})
	if err == nil {
		_, err = io.Copy(io.Discard, os.Stdin)
		err = errors.Join(err, consumer.Close())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "member:", err)
		return 1
	}
	return 0
}

// StartMember starts a member in a new process of this program.
func (t *T) StartMember(options Options, log *Log) *MemberProcess {
	encoded, err := json.Marshal(options)
	t.Must(err, "member")
	self, err := os.Executable()
	t.Must(err, "member")
	command := exec.Command(self)
	command.Env = append(os.Environ(), memberVariable+"="+string(encoded))
	command.Stderr = os.Stderr
	stdin, err := command.StdinPipe()
	t.Must(err, "member")
	stdout, err := command.StdoutPipe()
	t.Must(err, "member")
	t.Must(command.Start(), "member")
	// The process sets the times of its own events, and they are logged as they arrive. This process logs only the
	// member's end.
	member := &MemberProcess{
		Ownership: NewOwnership(options.Name, log), command: command, stdin: stdin, read: make(chan struct{}),
	}
	go func() {
		defer close(member.read)
		lines := bufio.NewScanner(stdout)
		for lines.Scan() {
			var event Event
			if err := json.Unmarshal(lines.Bytes(), &event); err != nil {
				t.Problem(fmt.Errorf("member %s: %w", options.Name, err))
				continue
			}
			member.follow(event)
			log.Write(event)
		}
	}()
	t.Cleanup(func() { member.Kill() })
	return member
}

func (m *MemberProcess) follow(event Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	partition := Partition{event.Topic, event.Partition}
	switch event.Kind {
	case "assigned":
		m.owned[partition] = true
	case "revoked", "lost":
		delete(m.owned, partition)
	case "closed":
		clear(m.owned)
	}
}

// Kill ends the process with SIGKILL: its connections are reset, and the group receives no LeaveGroup.
func (m *MemberProcess) Kill() {
	m.ended.Do(func() {
		_ = m.command.Process.Kill()
		<-m.read
		_ = m.command.Wait() // the error only says that the process was killed
		m.Ended("killed")
	})
}

// Stop stops the process with SIGSTOP, and returns once it is stopped. Its connections stay open.
func (m *MemberProcess) Stop() error {
	if err := m.command.Process.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	var status syscall.WaitStatus
	for {
		_, err := syscall.Wait4(m.command.Process.Pid, &status, syscall.WUNTRACED, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		if !status.Stopped() {
			return errors.New("member ended instead of stopping")
		}
		m.Ended("killed")
		return nil
	}
}

// Continue continues a stopped process with SIGCONT.
func (m *MemberProcess) Continue() error { return m.command.Process.Signal(syscall.SIGCONT) }

func (m *MemberProcess) Generation() int32 { return -1 }
func (m *MemberProcess) MemberID() string  { return "" }
func (m *MemberProcess) Err() error        { return nil }
func (m *MemberProcess) SetTopics([]string) {
	panic("a member process keeps its topics")
}

// Close closes the member, which leaves its group, and waits for the end of the process.
func (m *MemberProcess) Close() error {
	var err error
	m.ended.Do(func() {
		err = m.stdin.Close()
		<-m.read
		err = errors.Join(err, m.command.Wait())
	})
	return err
}
