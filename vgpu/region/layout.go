package region

// The numbers of carve_region.h. layout_test.go compares them with the compiled header.
const (
	// ABI is the version of both layouts that this package writes and reads.
	ABI = 1
	// MaxCards is the number of cards that one container can hold.
	MaxCards = 16
	// MaxSlots is the number of processes of one container that can use its cards at one time.
	MaxSlots = 1024
	// UnitBytes is the grain in which memory is charged.
	UnitBytes = 1 << unitShift
	// LimitsBytes is the size of the limits themselves, the first page of a limits file.
	LimitsBytes = 4096
	// LimitsFileBytes is the size of a limits file with all that compute is divided by. It is sparse: the pages
	// of cards that the container doesn't have aren't there.
	LimitsFileBytes = computeAt + MaxCards*computeCardBytes
	// UsageBytes is the size of a usage file. It is sparse: a page exists once a process has used it.
	UsageBytes = usageLines + MaxCards*usageColumnBytes

	// ContainerLimitsPath is where the library looks for the limits file inside a container.
	ContainerLimitsPath = "/usr/lib/carve/limits"
	// ContainerUsagePath is where the library looks for the usage file inside a container.
	ContainerUsagePath = "/usr/lib/carve/usage"

	unitShift = 9

	limitsMagic = 0x4d494c4556524143 // "CARVELIM"
	usageMagic  = 0x4553554556524143 // "CARVEUSE"

	limitsMagicAt      = 0
	limitsABIAt        = 8
	limitsSizeAt       = 12
	limitsGenerationAt = 16
	limitsBanksAt      = 64
	limitsLiveAt       = 2240

	bankBytes        = 1088
	bankGenerationAt = 0
	bankChecksumAt   = 8
	bankCardCountAt  = 16
	bankFlagsAt      = 20
	bankCardsAt      = 64

	cardBytes        = 64
	cardUUIDAt       = 0
	cardLimitAt      = 16
	cardContextAt    = 24
	cardComputePPMAt = 32
	cardFlagsAt      = 36
	cardPriorityAt   = 40
	cardMPSPercentAt = 44
	cardProcessorsAt = 48

	liveBytes              = 64
	liveResidualAt         = 0
	liveResidualSequenceAt = 8
	liveGateAt             = 16
	liveBusyContextsAt     = 20
	liveCalibrationAt      = 24

	cardComputeFixed  = 1
	cardManagedCount  = 2
	cardManagedForbid = 4
	cardOversell      = 8
	limitsSelfVisible = 1

	usageMagicAt     = 0
	usageABIAt       = 8
	usageSizeAt      = 12
	usageSlotCountAt = 16
	usageCardCountAt = 20
	usageHighWaterAt = 24
	usageHeaderBytes = 32 // the part of the header page that has a meaning
	usageProcesses   = 4096
	usageLines       = usageProcesses + MaxSlots*processBytes
	usageColumnBytes = MaxSlots * lineBytes

	processBytes          = 128
	processStatePIDAt     = 0
	processStartTicksAt   = 8
	processPIDNamespaceAt = 16
	processImageAt        = 24
	processLibraryABIAt   = 32

	lineBytes         = 128
	lineChargeAt      = 0
	lineSequenceAt    = 8
	lineContextAt     = 16
	lineManagedAt     = 24
	lineAllocationsAt = 32
	lineRefusalsAt    = 40
	lineLastRefusedAt = 48
	linePeakAt        = 56
	lineUnchargedAt   = 64
	lineImportedAt    = 72

	limitsComputeAt = 24

	computeAt          = 4096
	computeCardBytes   = 9 * 4096
	computeHeartbeatAt = 0
	computeTruthAt     = 8
	computeAheadAt     = 16
	computeContainerAt = 24
	computePaceAt      = 48
	computeTermsAt     = 16448

	paceCountAt    = 0
	paceContextsAt = 8
	paceMostAt     = 12
	pacePointsAt   = 16
	pacePoints     = 1024
	pacePointBytes = 16

	termsBytes        = 16
	termsCorrectionAt = 0
	termsShareAt      = 8
	termsFlagsAt      = 12
	termsGate         = 3
	termsBorrow       = 4
	termsOwner        = 0xffffff00

	lineComputeSequenceAt = 80
	lineChargedAt         = 88
	lineSinceAt           = 96
	lineCommittedAt       = 104
	lineCreditAt          = 112
	lineCreditTimeAt      = 120
	computeWaiting        = 1 << 63
)
