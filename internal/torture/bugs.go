package torture

import (
	"slices"

	"github.com/weirhq/weir/sql/testdata"
)

// findable are the bugs of the catalogue that a run of 20 s finds, whatever its seed. The others need an interleaving that is played
// step by step, an act that no process of a torture does, or only cost time: TestBugs finds all of them.
var findable = []string{
	"cursor-not-locked", "id-before-xid", "look-misses-fastpath", "raw-head", "segment-without-default", "settled-falls", "snapshot-xmax",
}

// BugNames are the names that Options.Break can have.
func BugNames() []string { return slices.Sorted(slices.Values(findable)) }

// breakIt are the texts that seed a bug into the default schema.
func breakIt(name string) (texts map[string]string, err error) {
	list, err := testdata.Bugs()
	if err != nil {
		return nil, err
	}
	return list[slices.IndexFunc(list, func(b testdata.Bug) bool { return b.Name == name })].Texts()
}
